"""Canonical forms of a task's program, by which two tasks are compared.

Guarantees: static (the code is parsed, never run); the same form for programs that differ in
comments, docstrings, annotations, white space, import aliases, names of their own, order of
definitions and of independent statements, order and default values of torch's arguments, the way in
which the constructor gets its arguments, `F.relu(x)` for `torch.relu(x)` or `x.relu()`, `x + y` for
`torch.add(y, x)`, folded constants, unreachable code, or a wrapper that only delegates; never
raises, whatever the text. Does not guarantee that equal programs get equal forms: `torch.relu(x)`
and `nn.ReLU()(x)` differ here and meet only in `operator_sequence`. Code that does not parse has no
canonical form, only its text and the tokens of its text.

A program is written as tokens: `$...` are names of its own, `#...` numbers (`#...~` a size by its
place, `#...^` an argument of the constructor), anything else is kept as it stands. To treat one
more kind of syntax, add a case to `_Scope.tokens`.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from kernels_eval.checks.syntax import UNPARSABLE, parse_source
from tasks.decontamination.arguments import CREATION, input_shapes, is_argument, specialise
from tasks.decontamination.operator_values import arithmetic
from tasks.decontamination.program import (
    Function,
    Program,
    bound_names,
    changes_arguments,
    inlined,
)

# Characters. `ast` takes about 400 bytes of memory a character, and no real task is near it.
CODE_LIMIT = 200_000
MAX_ORDERED_STATEMENTS = 200  # longer bodies keep their order: finding an order is quadratic
LARGEST_AXIS = 4  # whole numbers up to this are axes and exponents inside a method, not sizes
SIZES = frozenset(
    "in_channels out_channels in_features out_features in1_features in2_features num_features"
    " num_channels num_groups normalized_shape num_embeddings embedding_dim input_size hidden_size"
    " embed_dim num_heads num_parameters groups".split()
)
"""Arguments that are sizes however small."""
AXES = frozenset(
    "dim dims axis dim0 dim1 start_dim end_dim p ord norm_type diagonal exponent".split()
)
"""Arguments that are never sizes."""
ALIKE = frozenset("kernel_size stride padding dilation output_padding output_size".split())
"""Arguments where one number stands for as many equal ones."""
RESIZING = frozenset("view reshape expand repeat unflatten".split())
UNITS = ("kernel_size", "output_size", "stride")
"""Arguments of which 1 stays 1: a pointwise convolution, a global pooling and a window that moves
one by one are other operators."""
MARKS = "~^"
_METHODS: dict[str, dict[str, object]] = {
    "sum mean prod max min amax amin argmax argmin logsumexp": {"dim": None, "keepdim": False},
    "cumsum cumprod unsqueeze squeeze flip": {"dim": ...},
    "clamp": {"min": None, "max": None},
    "norm": {"p": "fro", "dim": None, "keepdim": False},
    "flatten": {"start_dim": 0, "end_dim": -1},
    "pow": {"exponent": ...},
}
METHODS = {name: parameters for names, parameters in _METHODS.items() for name in names.split()}
"""Parameters, after the tensor itself, of frequent functions that Python cannot ask for theirs
(https://docs.pytorch.org/docs/stable/torch.html), with their defaults; `...` where there is
none."""
COMMUTATIVE = ("add", "mul")
WEIGHTED = re.compile(r"conv|linear|prelu|embedding|norm")
"""Functions that take as tensors what their layers take as sizes."""
# Fields of syntax nodes that make no difference to what a program computes.
IGNORED_FIELDS = ("annotation", "returns", "type_comment", "ctx", "decorator_list")
ENDING = (ast.Return, ast.Raise, ast.Assert, ast.Break, ast.Continue, ast.Delete)

_WORD = re.compile(r"[A-Za-z_]\w{0,200}|\d[\w.]{0,200}|[^\w\s]")
_COMMENT = re.compile(r"#[^\n]*")
_BUILTINS = frozenset(dir(builtins))


@dataclass(frozen=True, slots=True)
class Canonical:
    """What a program is compared by.

    `exact`, `normalised`, `shapes` and `resized` are hexadecimal digests; the last three are None
    where the code does not parse. `shapes` leaves out sizes, `resized` also every number that is an
    argument of the constructor, whatever it is for. `inputs` are the shapes of the inputs as
    tokens, or the numbers in get_inputs where the shapes cannot be read. `details` are the class's
    arguments by name that are no sizes, in order: axes, modes, switches. `words` are the tokens of
    the class alone, before arguments are put in their places, with names and numbers blanked;
    shingles are cut from them.
    `text_words` are the tokens of the text without comments, compared where a task does not parse.
    """

    exact: str
    normalised: str | None
    shapes: str | None
    resized: str | None
    inputs: tuple[str, ...]
    details: tuple[str, ...]
    words: tuple[str, ...]
    text_words: tuple[str, ...]

    @property
    def parsed(self) -> bool:
        return self.normalised is not None


Names = tuple[str, ...]
Forms = tuple[str | None, str | None, str | None, Names, Names, Names]
NO_FORMS: Forms = (None, None, None, (), (), ())


def canonical(code: str, entry_point: str = "Model", program: Program | None = None) -> Canonical:
    """The canonical forms of a task whose class is `entry_point`. `program` is its
    `specialised_program` where the caller has it already."""
    exact = digest(line.rstrip() for line in code.strip().splitlines())
    text_words = tuple(_WORD.findall(_COMMENT.sub("", code[:CODE_LIMIT])))
    program, forms = program or specialised_program(code, entry_point), NO_FORMS
    plain = parse_program(code, entry_point)
    with suppress(RecursionError):  # only hostile text is nested this deep
        if program and plain:
            forms = (*_Writer(program).forms(), _Writer(plain).words())
    return Canonical(exact, *forms, text_words)


def parse_program(code: str, entry_point: str = "Model") -> Program | None:
    """The program, or None where it is no Python, too long, or nested too deep."""
    if len(code) > CODE_LIMIT:
        return None
    try:
        return Program(parse_source(code), entry_point)
    except UNPARSABLE:
        return None


def specialised_program(code: str, entry_point: str = "Model") -> Program | None:
    """The program with its constants in their places (`arguments.specialise`)."""
    if program := parse_program(code, entry_point):
        with suppress(RecursionError):
            specialise(program)
    return program


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
        self.pieces: dict[str, list[str]] = {}

    def forms(self) -> tuple[str, str, str, Names, Names]:
        """`normalised`, `shapes`, `resized`, `inputs` and `details` of a Canonical."""
        program = self.program
        called = [] if program.constructed else self._pieces("get_init_inputs")
        inputs = input_shapes(program)
        drawn = [] if inputs else self._pieces("get_inputs")
        body = [*self._class_pieces(), *called]
        pieces = [*body, *drawn, list(inputs or ())]
        whole = [token for tokens in pieces for token in ("def", *map(_plain, tokens))]
        shapes, resized = (
            [token for tokens in body for token in ("def", *_without_sizes(tokens, blank))]
            for blank in ("~", "^~")
        )
        found = inputs or tuple(t for tokens in drawn for t in tokens if t[0] == "#")
        digests = [digest(_numbered(each)) for each in (whole, shapes, ["resized", *resized])]
        return digests[0], digests[1], digests[2], found, _details(shapes)

    def words(self) -> tuple[str, ...]:
        """`words` of a Canonical."""
        tokens = (token for piece in self._class_pieces() for token in piece)
        return tuple(token[0] if token[0] in "$#" else token for token in tokens)

    def _class_pieces(self) -> list[list[str]]:
        entry = self.program.chain[-1]
        self._hint(entry)
        return self._pieces(f"{entry}.forward", f"{entry}.__init__")

    def _pieces(self, *units: str) -> list[list[str]]:
        """The tokens of some units and of everything that they reach and no earlier one did."""
        self.wanted = [*units]
        for unit in self.wanted:  # grows while it is read
            if unit not in self.pieces:
                self.pieces[unit] = self._unit(unit)
        return [self.pieces.pop(unit) for unit in dict.fromkeys(self.wanted) if unit in self.pieces]

    def _hint(self, entry: str) -> None:
        """Note what each attribute is built from, to order statements that use attributes not named
        yet."""
        unit = f"{entry}.__init__"
        init, scope = self.program.functions.get(unit), _Scope(self.program, unit)
        for statement in init.node.body if init else ():
            match statement:
                case ast.Assign([target], value):
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
        body = [node for node in function.node.body if not _is_noise(node)]
        if not body:
            return []
        out = scope.signature(function)
        self._learn(out)
        scope.inlined, body = inlined(body)
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


def _plain(token: str) -> str:
    """A number by its value alone: `2.0` is `2`, whether it is a size or not."""
    if token[0] != "#":
        return token
    number = token.rstrip(MARKS)
    return number.removesuffix(".0")


def _without_sizes(tokens: Sequence[str], marks: str) -> Iterator[str]:
    """The tokens with sizes and what has one of `marks` blanked, `kernel_size=(#, #)` as
    `kernel_size=#`."""
    left = [_unsized(token, marks) for token in tokens]
    while left:
        yield (token := left.pop(0))
        if token[:-1] in ALIKE and left[:1] == ["["]:
            end = left.index("]")
            if {*left[1:end]} == {"#"}:
                left[: end + 1] = ["#"]


def _unsized(token: str, marks: str) -> str:
    """Blank a size. Small whole numbers that their place does not make a size are axes and
    exponents, which make another computation; every other number is a size."""
    number = token[1:].rstrip(MARKS)
    axis = (
        token[-1] not in marks and number.lstrip("-").isdigit() and abs(int(number)) <= LARGEST_AXIS
    )
    return f"#{number}" if axis and token[0] == "#" else _numberless(token)


def _details(tokens: Sequence[str]) -> tuple[str, ...]:
    """Names and values of the arguments that are a number, a switch or a text."""
    plain = ((name, value) for name, value in pairwise(tokens) if name[-1] == "=" != name)
    return tuple(sorted(name + value for name, value in plain if value[0] in "#TF'"))


def _sized(tokens: list[str]) -> list[str]:
    """The tokens with their numbers marked as sizes."""
    return [f"{token.rstrip(MARKS)}~" if token[0] == "#" else token for token in tokens]


def _unmarked(tokens: list[str]) -> list[str]:
    return [token.rstrip(MARKS) if token[0] == "#" else token for token in tokens]


@cache
def _layer_parameters(name: str) -> Mapping[str, object]:
    """Parameters and defaults (`...` for none) of a class of torch.nn."""
    import torch

    found = vars(torch.nn).get(name)
    return _parameters(found) if isinstance(found, type) else {}


@cache
def _function_parameters(name: str) -> Mapping[str, object]:
    """The same of a function of a tensor, without the tensor; those of its layer where Python
    cannot ask the function."""
    import torch

    found = vars(torch.nn.functional).get(name)
    if name in METHODS or found is None:
        return METHODS.get(name, {})
    if inspect.isfunction(found) and (known := _parameters(found)):
        return dict(list(known.items())[1:])
    layers = {layer.lower(): layer for layer in vars(torch.nn)}
    layer = "" if WEIGHTED.search(name) else layers.get(name.replace("_", ""), "")
    return _layer_parameters(layer)


def _parameters(called: Callable[..., object]) -> dict[str, object]:
    listed = inspect.signature(called).parameters.values()
    if any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in listed):
        return {}
    return {each.name: ... if each.default is each.empty else each.default for each in listed}


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
        if isinstance(node, ast.Assign | ast.AnnAssign) and not changes_arguments(node):
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
            case ast.BinOp(left, op, right) if name := arithmetic(op):
                sides = self.tokens(left), self.tokens(right)
                return _operation(name, *sides)
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
        """Folded numbers and the module's constants in place. Empty for anything else."""
        value = self.program.fold(node, self.bound)
        if value is not None:
            tokens = _number(value)
            return [f"{t}^" if t[0] == "#" else t for t in tokens] if is_argument(node) else tokens
        return [f"'{node.value!r}"] if isinstance(node, ast.Constant) else []

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
        return [*self.tokens(node.value), f".{_not_in_place(node.attr)}"]

    def _call(self, node: ast.Call) -> list[str]:
        """A call: torch's functions of a tensor as its methods, arguments by name where the names
        are known, none that is its default."""
        called = (self.program.dotted(node.func) or "").replace(".nn.functional.", ".")
        args, words = list(node.args), list(node.keywords)
        last = _not_in_place(called.rpartition(".")[2])
        called = called[: called.rfind(".") + 1] + last
        if last in CREATION:
            return self._created(node, args, words)
        if called == f"torch.{last}" and not args and words and words[0].arg == "input":
            args.append(words.pop(0).value)
        known: Mapping[str, object] = {}
        if called == f"torch.{last}" and args and not isinstance(args[0], ast.Starred):
            head = [*self.tokens(args.pop(0)), f".{last}"]
            known = _function_parameters(last)
        else:
            head = self.tokens(node.func)
            if called == f"torch.nn.{last}":
                known = _layer_parameters(last)
            elif not called and isinstance(node.func, ast.Attribute) and head[-1] != ".forward":
                last = head[-1].removeprefix(".")
                known = _function_parameters(last)
        starred = any(isinstance(each, ast.Starred) for each in args)
        names = [] if starred else list(known)
        rest = [self.tokens(each) for each in args[len(names) :]]
        if last in COMMUTATIVE and len(rest) == 1 and not words and head[-1] == f".{last}":
            return _operation(last, head[:-1], rest[0])
        if last not in RESIZING and head[-1] == f".{last}":
            rest = [_unmarked(tokens) for tokens in rest]
        out = ["Call", *head, *(token for tokens in rest for token in tokens)]
        given = [*zip(names, args, strict=False), *((w.arg or "**", w.value) for w in words)]
        init = ""  # of the program's own class that is called
        if isinstance(node.func, ast.Name) and node.func.id in self.program.classes:
            init = f"{node.func.id}.__init__"
        named = {name: self._argument(name, value, known) for name, value in given}
        if not starred and "**" not in named:
            named = _with_defaults(named, known)
        for name in sorted(named):
            if name != "inplace":
                own = name in self.program.parameters(init)
                out += [f"${name}@{init}" if own else f"{name}=", *named[name]]
        return [*out, "end"]

    def _argument(self, name: str, value: ast.expr, known: Mapping[str, object]) -> list[str]:
        """The tokens of an argument, its numbers marked as its name says."""
        tokens = self.tokens(value)
        if tokens[0] == "[" and (name in ALIKE or (name in SIZES and len(tokens) == 3)):
            tokens = tokens[1:2] if len({*tokens[1:-1]}) == 1 else tokens
        if name in AXES:
            return _unmarked(tokens)
        if name in UNITS:
            return ["#1" if token == "#1^" else token for token in tokens]
        return _sized(tokens) if name in SIZES or isinstance(known.get(name), float) else tokens

    def _created(self, node: ast.Call, args: list[ast.expr], words: list[ast.keyword]) -> list[str]:
        """`torch.rand([2, 3])`, `torch.rand(2, 3)` and `torch.rand(size=(2, 3))`; every number is a
        size."""
        args += [word.value for word in words if word.arg == "size"]
        match args:
            case [only] if (tokens := self.tokens(only))[:1] == ["["]:
                sizes = tokens[1:-1]
            case _:
                sizes = self._all(args)
        out = ["Call", *self.tokens(node.func), *_sized(sizes)]
        for word in sorted(words, key=lambda word: word.arg or "**"):
            if word.arg != "size":
                out += [f"{word.arg or '**'}=", *self.tokens(word.value)]
        return [*out, "end"]


def _with_defaults(
    named: Mapping[str, list[str]], known: Mapping[str, object]
) -> dict[str, list[str]]:
    """Arguments without those that are their defaults, and with every scalar that has one, so that
    other values of it are another number, not another call."""
    out = dict(named)
    for name, default in known.items():
        if isinstance(default, float):
            out.setdefault(name, [f"#{default!r}~"])
        elif default is not ... and _unmarked(named.get(name, [])) == _number(default):
            del out[name]
    if known.get("stride", ...) is None and "kernel_size" in out:  # the stride of a pooling
        out.setdefault("stride", out["kernel_size"])
    return out


def _operation(name: str, left: list[str], right: list[str]) -> list[str]:
    """A binary operation as the call of a tensor's method. The sides of a sum and a product are
    ordered where they differ in more than names."""
    if name in COMMUTATIVE and "[" not in (left[0], right[0]):
        left, right = sorted((left, right), key=_shape_of)
    if name == "pow":
        right = ["exponent=", *_unmarked(right)]
    return ["Call", *left, f".{name}", *right, "end"]


def _shape_of(tokens: list[str]) -> list[str]:
    """Tokens without names and numbers; numbers last."""
    blank = {"$": "$", "#": "~#"}
    return ["$." if t[:2] == "$." else blank.get(t[0], t) for t in tokens]


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
        case None:
            return ["'None"]
    return [f"#{value!r}"]


def _not_in_place(name: str) -> str:
    """`mul` for `mul_`."""
    return name[:-1] if re.search(r"[a-z0-9]_\Z", name) else name
