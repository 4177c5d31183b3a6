"""Canonical forms of a task's program, by which two tasks are compared.

Guarantees: static (the code is parsed, never run); the same form for programs that differ in
comments, docstrings, annotations, white space, import aliases, names of their own, order of
definitions and of independent statements, order of keywords, folded constants, code that nothing
reaches, or a wrapper that only delegates; never raises, whatever the text. Does not guarantee that
equal programs get equal
forms: `torch.relu(x)` and `nn.ReLU()(x)` differ here and meet only in `operator_sequence`. Code
that does not parse has no canonical form, only its text and the tokens of its text.

A program is written as tokens: `$...` are names of its own, `#...` numbers, the rest is kept as it
stands.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tasks.decontamination.program import Function, Program, bound_names, delegate, inlined

# characters; ast takes about 400 bytes of memory a character, and no real task is near it
CODE_LIMIT = 200_000
ORDERED_STATEMENTS = 200  # longer bodies keep their order: finding an order is quadratic
_SMALL = 4  # whole numbers up to this are axes and exponents inside a method, not sizes
_CREATION = frozenset("rand randn zeros ones empty full randint".split())
_CONV = ("in_channels", "out_channels", "kernel_size", "stride", "padding")
_POSITIONS = {
    **{f"torch.nn.Conv{n}d": (*_CONV, "dilation", "groups", "bias") for n in (1, 2, 3)},
    **{
        f"torch.nn.ConvTranspose{n}d": (*_CONV, "output_padding", "groups", "bias", "dilation")
        for n in (1, 2, 3)
    },
    "torch.nn.Linear": ("in_features", "out_features", "bias"),
    **{f"torch.nn.BatchNorm{n}d": ("num_features", "eps", "momentum") for n in (1, 2, 3)},
    **{
        f"torch.nn.{kind}Pool{n}d": ("kernel_size", "stride", "padding")
        for n in (1, 2, 3)
        for kind in ("Max", "Avg")
    },
    **{f"torch.nn.functional.{name}": ("input", "dim") for name in ("softmax", "log_softmax")},
    **{
        f"torch.{name}": ("input", "dim", "keepdim")
        for name in ("softmax", "log_softmax", "mean", "sum", "argmax", "argmin")
    },
}
"""Parameters of frequent torch calls in order (https://docs.pytorch.org/docs/stable/nn.html), so
that `k` and `kernel_size=k` agree."""

_WORD = re.compile(r"[A-Za-z_]\w{0,200}|\d[\w.]{0,200}|[^\w\s]")
_COMMENT = re.compile(r"#[^\n]*")
_BUILTINS = frozenset(dir(builtins))


@dataclass(frozen=True, slots=True)
class Canonical:
    """What a program is compared by. The three keys are hexadecimal digests; `normalised` and
    `shapes` are None where it does not parse."""

    exact: str
    normalised: str | None
    shapes: str | None
    inputs: tuple[str, ...]  # the numbers in get_inputs, in order: its sizes
    words: tuple[
        str, ...
    ]  # tokens of the class alone, its names and numbers blanked: what shingles are cut from
    text_words: tuple[
        str, ...
    ]  # tokens of the text without comments, compared where one of two tasks does not parse

    @property
    def parsed(self) -> bool:
        return self.normalised is not None


def canonical(code: str, entry_point: str = "Model", program: Program | None = None) -> Canonical:
    """The canonical forms of a task whose class is `entry_point`. `program`: its parsed form where
    the caller has it already."""
    exact = digest(line.rstrip() for line in code.strip().splitlines())
    text_words = tuple(_WORD.findall(_COMMENT.sub("", code[:CODE_LIMIT])))
    program = program or parse_program(code, entry_point)
    if program is not None:
        try:
            return _Writer(program).canonical(exact, text_words)
        except RecursionError:
            pass  # nested as deep as only a hostile text is
    return Canonical(exact, None, None, (), (), text_words)


def parse_program(code: str, entry_point: str = "Model") -> Program | None:
    """The program, or None where it is no Python, too long, or nested too deep."""
    if len(code) > CODE_LIMIT:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # an invalid escape in somebody's docstring is not ours to report
            return Program(ast.parse(code), entry_point)
    except (
        SyntaxError,
        ValueError,
        RecursionError,
        MemoryError,
    ):  # ValueError: NUL bytes; the others: absurd nesting
        return None


def digest(parts: Iterator[str] | Sequence[str]) -> str:
    return hashlib.blake2b(
        "\n".join(parts).encode("utf-8", "surrogatepass"), digest_size=16
    ).hexdigest()


@dataclass(slots=True)
class _Statement:
    tokens: list[str]
    reads: frozenset[str]
    writes: frozenset[str]
    barrier: bool


class _Writer:
    """Writes one program: definitions in the order in which they are reached, each body in
    canonical order."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.index: dict[str, int] = {}
        self.hints: dict[str, str] = {}
        self.wanted: list[str] = []

    def canonical(self, exact: str, text_words: tuple[str, ...]) -> Canonical:
        program = self.program
        entry = delegate(program)
        own = [f"{entry}.forward", f"{entry}.__init__"]
        self.wanted = [*own, "get_inputs", "get_init_inputs"]
        self._hint(entry)
        pieces: dict[str, list[str]] = {}
        for unit in self.wanted:  # grows while it is read
            if unit in pieces:
                continue
            function = program.functions.get(unit)
            pieces[unit] = self._function(function, unit) if function else self._class_body(unit)
        inputs = tuple(token for token in pieces["get_inputs"] if token[0] == "#")
        whole = [token for unit, tokens in pieces.items() for token in ("def", *tokens)]
        shapes = [
            token
            for unit, tokens in pieces.items()
            for token in ("def", *map(_unsized if "." in unit else _numberless, tokens))
        ]
        words = [
            token
            for unit, tokens in pieces.items()
            if unit not in ("get_inputs", "get_init_inputs")
            for token in tokens
        ]
        return Canonical(
            exact,
            digest(self._named(whole)),
            digest(self._named(shapes)),
            inputs,
            tuple("$" if word[0] == "$" else "#" if word[0] == "#" else word for word in words),
            text_words,
        )

    def _hint(self, entry: str) -> None:
        """What each attribute is built from, to order statements that use attributes not named
        yet."""
        init = self.program.functions.get(f"{entry}.__init__")
        for statement in init.body if init else ():
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                scope = _Scope(self, f"{entry}.__init__", init)
                value = " ".join(
                    "$" if token[0] == "$" else token for token in scope.tokens(statement.value)
                )
                for token in scope.tokens(statement.targets[0]):
                    self.hints.setdefault(token, f"${value}")

    def _function(self, function: Function, unit: str) -> list[str]:
        scope = _Scope(self, unit, function)
        out = scope.signature()
        self._learn(out)
        body = [node for node in function.body if not _is_noise(node)]
        scope.inlined, body = inlined(body)
        statements = [scope.statement(node) for node in body]
        for statement in self._ordered(statements):
            out += statement.tokens
        self.wanted += [name for name in scope.reached if name not in self.wanted]
        return out

    def _class_body(self, unit: str) -> list[str]:
        """A class reached by name: its methods are wanted, the statements of its own body are
        written."""
        node = self.program.classes.get(unit)
        if node is None:
            return self._variable(unit)
        self.wanted += [f"{unit}.forward", f"{unit}.__init__"]
        scope = _Scope(self, unit, None)
        out = [token for base in node.bases for token in scope.tokens(base)]
        for statement in node.body:
            if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_noise(
                statement
            ):
                out += scope.statement(statement).tokens
        self.wanted += [name for name in scope.reached if name not in self.wanted]
        return out

    def _variable(self, unit: str) -> list[str]:
        """What a module's variable that is no constant is made of."""
        value = self.program.variables.get(unit)
        if value is None:
            return []
        scope = _Scope(self, unit, None)
        out = scope.tokens(value)
        self.wanted += [name for name in scope.reached if name not in self.wanted]
        return out

    def _ordered(self, statements: list[_Statement]) -> Iterator[_Statement]:
        """Statements in the least order that their reads and writes allow, by tokens that no choice
        of names changes."""
        left = list(range(len(statements)))
        if len(left) > ORDERED_STATEMENTS:
            left = []
            yield from statements
        while left:
            ready = [
                i
                for position, i in enumerate(left)
                if not any(_depends(statements[i], statements[j]) for j in left[:position])
            ]
            chosen = (
                min(ready, key=lambda i: self._key(statements[i].tokens))
                if len(ready) > 1
                else ready[0]
            )
            left.remove(chosen)
            self._learn(statements[chosen].tokens)
            yield statements[chosen]

    def _key(self, tokens: list[str]) -> tuple[list[str], list[str]]:
        # a name met before is its number, an attribute not met what it is built from, any other
        # nothing; sizes decide last
        named = [
            f"${self.index[t]}" if t in self.index else self.hints.get(t, "$") if t[0] == "$" else t
            for t in tokens
        ]
        return [_numberless(token) for token in named], named

    def _learn(self, tokens: list[str]) -> None:
        for token in tokens:
            if token[0] == "$":
                self.index.setdefault(token, len(self.index))

    def _named(self, tokens: Sequence[str]) -> Iterator[str]:
        """Own names by order of appearance in these tokens."""
        seen: dict[str, int] = {}
        for token in tokens:
            yield f"${seen.setdefault(token, len(seen))}" if token[0] == "$" else token


def _depends(later: _Statement, earlier: _Statement) -> bool:
    if later.barrier or earlier.barrier:
        return True
    return bool(
        earlier.writes & later.reads
        or earlier.writes & later.writes
        or earlier.reads & later.writes
    )


def _is_noise(node: ast.stmt) -> bool:
    """Docstrings, `pass`, `print(...)`, `super().__init__()` and imports: nothing that tells two
    programs apart."""
    if isinstance(node, ast.Pass | ast.Import | ast.ImportFrom):
        return True
    if not isinstance(node, ast.Expr):
        return False
    value = node.value
    if isinstance(value, ast.Constant):
        return True
    if not isinstance(value, ast.Call):
        return False
    if isinstance(value.func, ast.Name):
        return value.func.id == "print"
    inner = (
        value.func.value
        if isinstance(value.func, ast.Attribute) and value.func.attr == "__init__"
        else None
    )
    return (
        isinstance(inner, ast.Call)
        and isinstance(inner.func, ast.Name)
        and inner.func.id == "super"
        and not value.args
    )


def _numberless(token: str) -> str:
    return "#" if token[0] == "#" else token


def _unsized(token: str) -> str:
    """Inside a class small whole numbers are axes and exponents, which make another computation;
    every other number is a size."""
    return (
        "#"
        if token[0] == "#"
        and not (token[1:].lstrip("-").isdigit() and abs(int(token[1:])) <= _SMALL)
        else token
    )


class _Scope:
    """Tokens of the expressions and statements of one function (or class body)."""

    def __init__(self, writer: _Writer, unit: str, function: Function | None) -> None:
        self.program, self.unit = writer.program, unit
        self.owner = unit.partition(".")[0]
        self.function = function
        self.bound = bound_names(function.node) if function else frozenset()
        self.self_name = (
            function.parameters[0] if function and "." in unit and function.parameters else None
        )
        self.reached: list[str] = []
        self.inlined: dict[int, ast.expr] = {}

    def signature(self) -> list[str]:
        node = self.function.node.args
        out = ["(", *(self._own(name) for name in self.function.parameters)]
        for default in [*node.defaults, *(value for value in node.kw_defaults if value)]:
            out += ["=", *self.tokens(default)]
        return [*out, ")"]

    def statement(self, node: ast.stmt) -> _Statement:
        tokens = self.tokens(node)
        idents = frozenset(token for token in tokens if token[0] == "$")
        barrier = isinstance(
            node, ast.Return | ast.Raise | ast.Assert | ast.Break | ast.Continue | ast.Delete
        )
        changed = any(map(_in_place, tokens))
        if isinstance(node, ast.Assign | ast.AnnAssign) and not changed:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            writes = frozenset(
                token for target in targets for token in self.tokens(target) if token[0] == "$"
            )
            writes -= {self._own(self.self_name)} if self.self_name else frozenset()
        else:
            writes = idents  # whatever it touches it may have changed
        return _Statement(tokens, idents, writes, barrier)

    def tokens(self, node: ast.AST) -> list[str]:
        out: list[str] = []
        self._write(node, out)
        return out

    def _own(self, name: str) -> str:
        return f"${name}@{self.unit}" if name in self.bound else f"${name}"

    def _write(self, node: ast.AST, out: list[str]) -> None:
        if id(node) in self.inlined:
            node = self.inlined[id(node)]
        if isinstance(node, ast.BinOp | ast.UnaryOp | ast.Name | ast.Constant) and self._literal(
            node, out
        ):
            return
        if isinstance(node, ast.Name):
            self._name(node.id, out)
        elif isinstance(node, ast.Attribute):
            self._attribute(node, out)
        elif isinstance(node, ast.Call):
            self._call(node, out)
        elif isinstance(node, ast.List | ast.Tuple):
            out.append("[")
            for item in node.elts:
                self._write(item, out)
            out.append("]")
        elif isinstance(node, ast.AugAssign):  # x += y reads as x = x + y
            out.append("Assign")
            self._write(node.target, out)
            self._write(ast.BinOp(left=node.target, op=node.op, right=node.value), out)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            if node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    out.append("Assign")
                    self._write(target, out)
                self._write(node.value, out)
        else:
            self._generic(node, out)

    def _generic(self, node: ast.AST, out: list[str]) -> None:
        out.append(type(node).__name__)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "type_comment", "ctx", "decorator_list"):
                continue
            if isinstance(value, ast.AST):
                self._write(value, out)
            elif isinstance(value, list):
                for item in value:
                    if isinstance(item, ast.stmt) and _is_noise(item):
                        continue
                    if isinstance(item, ast.AST):
                        self._write(item, out)
            elif isinstance(value, str):
                out.append(self._own(value) if name in ("arg", "name") else f".{value}")
        out.append("end")

    def _literal(self, node: ast.expr, out: list[str]) -> bool:
        """Numbers, folded, and the module's constants, inlined; strings that name a parameter of
        the class in its init inputs."""
        value = self.program.fold(node, self.bound)
        if value is None:
            if isinstance(node, ast.Constant):
                known = (
                    isinstance(node.value, str)
                    and self.unit == "get_init_inputs"
                    and node.value in self.program.entry_parameters
                )
                out.append(
                    f"${node.value}@{self.program.entry}.__init__" if known else f"'{node.value!r}"
                )
                return True
            return False
        out.extend(_number(value))
        return True

    def _name(self, name: str, out: list[str]) -> None:
        if name in self.program.imports and name not in self.bound:
            out.append(self.program.imports[name])
        elif name in _BUILTINS and name not in self.bound and name not in self.program.defined:
            out.append(name)
        else:
            if name not in self.bound and name in self.program.defined:
                self.reached.append(name)
            out.append(self._own(name))

    def _attribute(self, node: ast.Attribute, out: list[str]) -> None:
        dotted = self.program.dotted(node)
        if dotted and dotted.partition(".")[0] not in self.bound:
            out.append(dotted)
        elif isinstance(node.value, ast.Name) and node.value.id == self.self_name:
            out.append(f"$.{node.attr}@{self.owner}")
            self.reached.append(f"{self.owner}.{node.attr}")
        else:
            self._write(node.value, out)
            out.append(f".{node.attr}")

    def _call(self, node: ast.Call, out: list[str]) -> None:
        called = self.program.dotted(node.func) or ""
        out.append("Call")
        self._write(node.func, out)
        args: Sequence[ast.expr] = node.args
        if (
            called.rpartition(".")[2] in _CREATION
            and len(args) == 1
            and isinstance(args[0], ast.List | ast.Tuple)
        ):
            args = args[0].elts  # torch.rand([2, 3]) and torch.rand(2, 3)
        names = _POSITIONS.get(called, ())
        keywords = (
            list(zip(names, args, strict=False))
            if names and not any(isinstance(arg, ast.Starred) for arg in args)
            else []
        )
        for arg in args[len(keywords) :]:
            self._write(arg, out)
        user = (
            f"{node.func.id}.__init__"
            if isinstance(node.func, ast.Name) and node.func.id in self.program.classes
            else None
        )
        keywords += [
            (word.arg or "**", word.value) for word in node.keywords if word.arg != "inplace"
        ]
        for name, value in sorted(keywords, key=lambda pair: pair[0]):
            known = user and name in self.program.parameters(user)
            out.append(f"${name}@{user}" if known else f"{name}=")
            self._write(value, out)
        out.append("end")


def _number(value: object) -> list[str]:
    if isinstance(value, tuple):
        return ["[", *(token for item in value for token in _number(item)), "]"]
    if isinstance(value, str):
        return [f"'{value!r}"]
    return [str(value)] if isinstance(value, bool) else [f"#{value!r}"]


def _in_place(token: str) -> bool:
    """Is it the name of a torch function or method that changes its argument (`mul_`,
    `torch.nn.init.constant_`)?"""
    return token.endswith("_") and not token.endswith("__") and token[0] not in "$'"
