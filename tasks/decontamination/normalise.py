"""Canonical forms of a task's program, by which two tasks are compared.

Guarantees: static (the code is parsed, never run); the same form for programs that differ in
comments, docstrings, annotations, white space, import aliases, names of their own, order of
definitions and of independent statements, order of keywords, folded constants, unreachable code, or
a wrapper that only delegates; never raises, whatever the text. Does not guarantee that equal
programs get equal forms: `torch.relu(x)` and `nn.ReLU()(x)` differ here and meet only in
`operator_sequence`. Code that does not parse has no canonical form, only its text and the tokens of
its text.

A program is written as tokens: `$...` are names of its own, `#...` numbers, anything else is kept
as it stands. To treat one more kind of syntax, add a case to `_Scope.tokens`.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kernels_eval.checks.syntax import UNPARSABLE, parse_source
from tasks.decontamination.program import Function, Program, bound_names, delegate, inlined

# Characters. `ast` takes about 400 bytes of memory a character, and no real task is near it.
CODE_LIMIT = 200_000
MAX_ORDERED_STATEMENTS = 200  # longer bodies keep their order: finding an order is quadratic
LARGEST_AXIS = 4  # whole numbers up to this are axes and exponents inside a method, not sizes
CREATION = frozenset("rand randn zeros ones empty full randint".split())
CONV = "in_channels out_channels kernel_size stride padding"
POOL = "kernel_size stride padding"
POSITIONS = {
    f"torch.{name}": parameters.split()
    for names, parameters in {
        "nn.Conv1d nn.Conv2d nn.Conv3d": f"{CONV} dilation groups bias",
        "nn.ConvTranspose1d nn.ConvTranspose2d nn.ConvTranspose3d": (
            f"{CONV} output_padding groups bias dilation"
        ),
        "nn.Linear": "in_features out_features bias",
        "nn.BatchNorm1d nn.BatchNorm2d nn.BatchNorm3d": "num_features eps momentum",
        "nn.MaxPool1d nn.MaxPool2d nn.MaxPool3d": POOL,
        "nn.AvgPool1d nn.AvgPool2d nn.AvgPool3d": POOL,
        "nn.functional.softmax nn.functional.log_softmax": "input dim",
        "softmax log_softmax mean sum argmax argmin": "input dim keepdim",
    }.items()
    for name in names.split()
}
"""Parameters of frequent torch calls in order (https://docs.pytorch.org/docs/stable/nn.html), so
that `k` and `kernel_size=k` agree."""
INPUT_UNITS = ("get_inputs", "get_init_inputs")
# Fields of syntax nodes that make no difference to what a program computes.
IGNORED_FIELDS = ("annotation", "returns", "type_comment", "ctx", "decorator_list")
ENDING = (ast.Return, ast.Raise, ast.Assert, ast.Break, ast.Continue, ast.Delete)

_WORD = re.compile(r"[A-Za-z_]\w{0,200}|\d[\w.]{0,200}|[^\w\s]")
_COMMENT = re.compile(r"#[^\n]*")
_BUILTINS = frozenset(dir(builtins))


@dataclass(frozen=True, slots=True)
class Canonical:
    """What a program is compared by.

    `exact`, `normalised` and `shapes` are hexadecimal digests; the last two are None where the code
    does not parse. `inputs` are the numbers in get_inputs in order, its sizes. `words` are the
    tokens of the class alone with names and numbers blanked, from which shingles are cut.
    `text_words` are the tokens of the text without comments, compared where a task does not parse.
    """

    exact: str
    normalised: str | None
    shapes: str | None
    inputs: tuple[str, ...]
    words: tuple[str, ...]
    text_words: tuple[str, ...]

    @property
    def parsed(self) -> bool:
        return self.normalised is not None


Forms = tuple[str | None, str | None, tuple[str, ...], tuple[str, ...]]
NO_FORMS: Forms = (None, None, (), ())


def canonical(code: str, entry_point: str = "Model", program: Program | None = None) -> Canonical:
    """The canonical forms of a task whose class is `entry_point`. `program` is its parsed form
    where the caller has it already."""
    exact = digest(line.rstrip() for line in code.strip().splitlines())
    text_words = tuple(_WORD.findall(_COMMENT.sub("", code[:CODE_LIMIT])))
    program, forms = program or parse_program(code, entry_point), NO_FORMS
    with suppress(RecursionError):  # only hostile text is nested this deep
        forms = _Writer(program).forms() if program else NO_FORMS
    return Canonical(exact, *forms, text_words)


def parse_program(code: str, entry_point: str = "Model") -> Program | None:
    """The program, or None where it is no Python, too long, or nested too deep."""
    if len(code) > CODE_LIMIT:
        return None
    try:
        return Program(parse_source(code), entry_point)
    except UNPARSABLE:
        return None


def digest(parts: Iterable[str]) -> str:
    """A hash of some texts, as hexadecimal digits."""
    text = "\n".join(parts).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


@dataclass(slots=True)
class _Statement:
    tokens: list[str]
    reads: frozenset[str]
    writes: frozenset[str]
    barrier: bool

    def depends_on(self, earlier: _Statement) -> bool:
        shared = earlier.writes & (self.reads | self.writes) or earlier.reads & self.writes
        return self.barrier or earlier.barrier or bool(shared)


class _Writer:
    """Writes one program: definitions in the order in which they are reached, each body in
    canonical order."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.index: dict[str, int] = {}
        self.hints: dict[str, str] = {}
        self.wanted: list[str] = []

    def forms(self) -> Forms:
        """`normalised`, `shapes`, `inputs` and `words` of a Canonical."""
        entry = delegate(self.program)
        self.wanted = [f"{entry}.forward", f"{entry}.__init__", *INPUT_UNITS]
        self._hint(entry)
        pieces: dict[str, list[str]] = {}
        for unit in self.wanted:  # grows while it is read
            if unit not in pieces:
                pieces[unit] = self._unit(unit)
        whole, shapes, words = [], [], []
        for unit, tokens in pieces.items():
            whole += ["def", *tokens]
            shapes += ["def", *map(_unsized if "." in unit else _numberless, tokens)]
            if unit not in INPUT_UNITS:
                words += [token[0] if token[0] in "$#" else token for token in tokens]
        inputs = tuple(token for token in pieces["get_inputs"] if token[0] == "#")
        return digest(_numbered(whole)), digest(_numbered(shapes)), inputs, tuple(words)

    def _hint(self, entry: str) -> None:
        """Note what each attribute is built from, to order statements that use attributes not named
        yet."""
        unit = f"{entry}.__init__"
        init = self.program.functions.get(unit)
        for statement in init.node.body if init else ():
            match statement:
                case ast.Assign([target], value):
                    scope = _Scope(self.program, unit)
                    tokens = ("$" if token[0] == "$" else token for token in scope.tokens(value))
                    hint = f"${' '.join(tokens)}"
                    for token in scope.tokens(target):
                        self.hints.setdefault(token, hint)

    def _unit(self, unit: str) -> list[str]:
        """The tokens of a function, of a class reached by name, or of what a module's variable is
        made of. Everything that it reaches is wanted next."""
        scope, out = _Scope(self.program, unit), []
        if scope.function:
            out = self._function(scope, scope.function)
        elif node := self.program.classes.get(unit):
            self.wanted += [f"{unit}.forward", f"{unit}.__init__"]
            own = (each for each in node.body if not isinstance(each, FUNCTIONS))
            parts = [*node.bases, *(each for each in own if not _is_noise(each))]
            out = [token for part in parts for token in scope.tokens(part)]
        elif value := self.program.variables.get(unit):
            out = scope.tokens(value)
        self.wanted += [name for name in scope.reached if name not in self.wanted]
        return out

    def _function(self, scope: _Scope, function: Function) -> list[str]:
        out = scope.signature(function)
        self._learn(out)
        scope.inlined, body = inlined([node for node in function.node.body if not _is_noise(node)])
        for statement in self._ordered([scope.statement(node) for node in body]):
            out += statement.tokens
        return out

    def _ordered(self, statements: list[_Statement]) -> Iterator[_Statement]:
        """Statements in the least order that their reads and writes allow, by tokens that no choice
        of names changes."""
        left = list(statements)
        if len(left) > MAX_ORDERED_STATEMENTS:
            yield from left
            return
        while left:
            ready = [
                each
                for i, each in enumerate(left)
                if not any(each.depends_on(earlier) for earlier in left[:i])
            ]
            chosen = ready[0] if len(ready) == 1 else min(ready, key=self._key)
            left = [each for each in left if each is not chosen]
            self._learn(chosen.tokens)
            yield chosen

    def _key(self, statement: _Statement) -> tuple[list[str], list[str]]:
        """A known name is its number, an unknown attribute what it is built from, any other name
        nothing. Sizes decide last."""
        named = [
            f"${self.index[t]}" if t in self.index else self.hints.get(t, "$") if t[0] == "$" else t
            for t in statement.tokens
        ]
        return [_numberless(token) for token in named], named

    def _learn(self, tokens: list[str]) -> None:
        for token in tokens:
            if token[0] == "$":
                self.index.setdefault(token, len(self.index))


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _is_noise(node: ast.AST) -> bool:
    """Whether a statement is a docstring, `pass`, `print(...)`, `super().__init__()` or an import:
    nothing that tells two programs apart."""
    match node:
        case ast.Pass() | ast.Import() | ast.ImportFrom() | ast.Expr(ast.Constant()):
            return True
        case ast.Expr(ast.Call(ast.Name("print"))):
            return True
        case ast.Expr(ast.Call(ast.Attribute(ast.Call(ast.Name("super")), "__init__"), [])):
            return True
    return False


def _numbered(tokens: Sequence[str]) -> Iterator[str]:
    """The tokens with own names replaced by their order of appearance."""
    seen: dict[str, int] = {}
    for token in tokens:
        yield f"${seen.setdefault(token, len(seen))}" if token[0] == "$" else token


def _numberless(token: str) -> str:
    return "#" if token[0] == "#" else token


def _unsized(token: str) -> str:
    """Blank a size. Inside a class small whole numbers are axes and exponents, which make another
    computation; every other number is a size."""
    number = token[1:]
    axis = number.lstrip("-").isdigit() and abs(int(number)) <= LARGEST_AXIS
    return token if axis else _numberless(token)


class _Scope:
    """Tokens of the expressions and statements of one function, class body or variable."""

    def __init__(self, program: Program, unit: str) -> None:
        self.program, self.unit = program, unit
        self.owner, _, method = unit.partition(".")
        self.function = function = program.functions.get(unit)
        self.bound = bound_names(function.node) if function else frozenset[str]()
        first = function.parameters[:1] if function and method else ()
        self.self_name = first[0] if first else None
        self.reached: list[str] = []
        self.inlined: dict[int, ast.expr] = {}

    def signature(self, function: Function) -> list[str]:
        args = function.node.args
        out = ["(", *map(self._own, function.parameters)]
        for default in (*args.defaults, *filter(None, args.kw_defaults)):
            out += ["=", *self.tokens(default)]
        return [*out, ")"]

    def statement(self, node: ast.stmt) -> _Statement:
        tokens = self.tokens(node)
        reads = writes = _own_names(tokens)  # whatever it touches it may have changed
        if isinstance(node, ast.Assign | ast.AnnAssign) and not any(map(_in_place, tokens)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            writes = frozenset().union(*(_own_names(self.tokens(target)) for target in targets))
            writes -= {self._own(self.self_name or "")}
        return _Statement(tokens, reads, writes, isinstance(node, ENDING))

    def tokens(self, node: ast.AST) -> list[str]:
        """The tokens of any piece of syntax."""
        node = self.inlined.get(id(node), node)
        if isinstance(node, ast.BinOp | ast.UnaryOp | ast.Name | ast.Constant):
            if literal := self._literal(node):
                return literal
        match node:
            case ast.Name(name):
                return [self._name(name)]
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call():
                return self._call(node)
            case ast.List(items) | ast.Tuple(items):
                return ["[", *self._all(items), "]"]
            case ast.AugAssign(target, op, value):  # x += y reads as x = x + y
                return self._assignment([target], ast.BinOp(left=target, op=op, right=value))
            case ast.Assign(targets, value):
                return self._assignment(targets, value)
            case ast.AnnAssign(target, value=value):
                return self._assignment([target], value) if value else []
        return self._generic(node)

    def _all(self, nodes: Iterable[ast.AST]) -> list[str]:
        return [token for node in nodes for token in self.tokens(node)]

    def _assignment(self, targets: Sequence[ast.expr], value: ast.expr) -> list[str]:
        out = []
        for target in targets:
            out += ["Assign", *self.tokens(target)]
        return out + self.tokens(value)

    def _generic(self, node: ast.AST) -> list[str]:
        out = [type(node).__name__]
        for name, value in ast.iter_fields(node):
            if name in IGNORED_FIELDS:
                continue
            if isinstance(value, str):
                out.append(self._own(value) if name in ("arg", "name") else f".{value}")
                continue
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, ast.AST) and not _is_noise(item):
                    out += self.tokens(item)
        return [*out, "end"]

    def _literal(self, node: ast.expr) -> list[str]:
        """Folded numbers and the module's constants in place; a string of the init inputs that
        names a parameter of the class, as that parameter. Empty for anything else."""
        value = self.program.fold(node, self.bound)
        if value is not None:
            return _number(value)
        if not isinstance(node, ast.Constant):
            return []
        if self.unit == "get_init_inputs" and node.value in self.program.entry_parameters:
            return [f"${node.value!s}@{self.program.entry}.__init__"]
        return [f"'{node.value!r}"]

    def _own(self, name: str) -> str:
        return f"${name}@{self.unit}" if name in self.bound else f"${name}"

    def _name(self, name: str) -> str:
        if name not in self.bound:
            if name in self.program.imports:
                return self.program.imports[name]
            if name in self.program.defined:
                self.reached.append(name)
            elif name in _BUILTINS:
                return name
        return self._own(name)

    def _attribute(self, node: ast.Attribute) -> list[str]:
        dotted = self.program.dotted(node)
        if dotted and dotted.partition(".")[0] not in self.bound:
            return [dotted]
        if isinstance(node.value, ast.Name) and node.value.id == self.self_name:
            self.reached.append(f"{self.owner}.{node.attr}")
            return [f"$.{node.attr}@{self.owner}"]
        return [*self.tokens(node.value), f".{node.attr}"]

    def _call(self, node: ast.Call) -> list[str]:
        called = self.program.dotted(node.func) or ""
        args: Sequence[ast.expr] = node.args
        match args:
            case [ast.List(items) | ast.Tuple(items)] if called.rpartition(".")[2] in CREATION:
                args = items  # torch.rand([2, 3]) and torch.rand(2, 3)
        starred = any(isinstance(arg, ast.Starred) for arg in args)
        names = [] if starred else POSITIONS.get(called, [])
        keywords = list(zip(names, args, strict=False))
        out = ["Call", *self.tokens(node.func), *self._all(args[len(keywords) :])]
        keywords += [(word.arg or "**", word.value) for word in node.keywords]
        init = ""  # of the program's own class that is called
        if isinstance(node.func, ast.Name) and node.func.id in self.program.classes:
            init = f"{node.func.id}.__init__"
        for name, value in sorted(keywords, key=lambda pair: pair[0]):
            if name != "inplace":
                known = name in self.program.parameters(init)
                out += [f"${name}@{init}" if known else f"{name}=", *self.tokens(value)]
        return [*out, "end"]


def _own_names(tokens: Iterable[str]) -> frozenset[str]:
    return frozenset(token for token in tokens if token[0] == "$")


def _number(value: object) -> list[str]:
    match value:
        case tuple(items):
            return ["[", *(token for item in items for token in _number(item)), "]"]
        case str():
            return [f"'{value!r}"]
        case bool():
            return [str(value)]
    return [f"#{value!r}"]


def _in_place(token: str) -> bool:
    """Whether a token names a torch function or method that changes its argument (`mul_`,
    `torch.nn.init.constant_`)."""
    return token.endswith("_") and not token.endswith("__") and token[0] not in "$'"
