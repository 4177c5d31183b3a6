"""How a program's syntax is written as tokens, the same for every way to write one thing.

`$...` are names of the program's own, `#...` numbers (`#...~` a size by its place, `#...^` an
argument of the constructor), anything else is kept as it stands. To treat one more kind of syntax,
add a case to `Scope.tokens`.

Guarantees: static, nothing is executed. Raises RecursionError for syntax that is nested too deep.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from tasks.decontamination.arguments import is_argument
from tasks.decontamination.operator_values import arithmetic
from tasks.decontamination.program import (
    Function,
    Program,
    bound_names,
    changes_arguments,
    parameters_of,
)
from tasks.decontamination.shapes import CREATION

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
_BUILTINS = frozenset(dir(builtins))


@dataclass(slots=True)
class Statement:
    """Tokens of a statement, the names of the program that it reads and writes, and whether nothing
    passes it."""

    tokens: list[str]
    reads: frozenset[str]
    writes: frozenset[str]
    barrier: bool

    def depends_on(self, earlier: Statement) -> bool:
        shared = earlier.writes & (self.reads | self.writes) or earlier.reads & self.writes
        return self.barrier or earlier.barrier or bool(shared)


def is_noise(node: ast.AST) -> bool:
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


def marked(tokens: Iterable[str], mark: str = "") -> list[str]:
    """The tokens with this mark on their numbers, and no other."""
    return [token.rstrip(MARKS) + mark if token[0] == "#" else token for token in tokens]


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


class Scope:
    """Tokens of the expressions and statements of one function, class body or variable."""

    def __init__(self, program: Program, unit: str) -> None:
        self.program, self.unit = program, unit
        self.owner, _, method = unit.partition(".")
        self.function = function = program.functions.get(unit)
        self.bound = bound_names(function) if function else frozenset[str]()
        self.self_name = next(iter(parameters_of(function)), "") if method else ""
        self.reached: list[str] = []
        self.inlined: dict[int, ast.expr] = {}

    def signature(self, function: Function) -> list[str]:
        out = ["(", *map(self._own, parameters_of(function))]
        for default in (*function.args.defaults, *filter(None, function.args.kw_defaults)):
            out += ["=", *self.tokens(default)]
        return [*out, ")"]

    def statement(self, node: ast.stmt) -> Statement:
        tokens = self.tokens(node)
        reads = writes = _own_names(tokens)  # whatever it touches it may have changed
        if isinstance(node, ast.Assign | ast.AnnAssign) and not changes_arguments(node):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            writes = frozenset().union(*(_own_names(self.tokens(target)) for target in targets))
            writes -= {self._own(self.self_name)}
        return Statement(tokens, reads, writes, isinstance(node, ENDING))

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
                return _operation(name, self.tokens(left), self.tokens(right))
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
                if isinstance(item, ast.AST) and not is_noise(item):
                    out += self.tokens(item)
        return [*out, "end"]

    def _literal(self, node: ast.expr) -> list[str]:
        """Folded numbers and the module's constants in place. Empty for anything else."""
        value = self.program.fold(node, self.bound)
        if value is not None:
            return marked(_number(value), "^" if is_argument(node) else "")
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
        args, words = [*node.args], [*node.keywords]
        dotted = self.program.dotted(node.func) or ""
        module, _, last = dotted.replace(".nn.functional.", ".").rpartition(".")
        if _not_in_place(last) in CREATION:
            return self._created(node, args, words)
        head, last, known = self._called(node.func, module, _not_in_place(last), args, words)
        starred = any(isinstance(each, ast.Starred) for each in args)
        names = [] if starred else list(known)
        rest = [self.tokens(each) for each in args[len(names) :]]
        if head[-1] == f".{last}":
            if last in COMMUTATIVE and len(rest) == 1 and not words:
                return _operation(last, head[:-1], rest[0])
            if last not in RESIZING:
                rest = [marked(tokens) for tokens in rest]
        given = [*zip(names, args, strict=False), *((w.arg or "**", w.value) for w in words)]
        named = {name: self._argument(name, value, known) for name, value in given}
        if not starred and "**" not in named:
            named = _with_defaults(named, known)
        own = self._own_parameters(node.func)
        out = ["Call", *head, *(token for tokens in rest for token in tokens)]
        for name in sorted(named):
            if name != "inplace":
                out += [own.get(name, f"{name}="), *named[name]]
        return [*out, "end"]

    def _called(
        self,
        func: ast.expr,
        module: str,
        last: str,
        args: list[ast.expr],
        words: list[ast.keyword],
    ) -> tuple[list[str], str, Mapping[str, object]]:
        """What is called, its last name, and its parameters where they are known. The tensor of one
        of torch's functions leaves the arguments: it has the method."""
        if module == "torch" and not args and words and words[0].arg == "input":
            args.append(words.pop(0).value)
        if module == "torch" and args and not isinstance(args[0], ast.Starred):
            return [*self.tokens(args.pop(0)), f".{last}"], last, _function_parameters(last)
        head = self.tokens(func)
        if module == "torch.nn":
            return head, last, _layer_parameters(last)
        if not last and isinstance(func, ast.Attribute) and head[-1] != ".forward":
            last = head[-1].removeprefix(".")
            return head, last, _function_parameters(last)
        return head, last, {}

    def _own_parameters(self, func: ast.expr) -> dict[str, str]:
        """Tokens of the parameters of the program's own class that is called."""
        if not isinstance(func, ast.Name) or func.id not in self.program.classes:
            return {}
        init = f"{func.id}.__init__"
        names = parameters_of(self.program.functions.get(init))
        return {name: f"${name}@{init}" for name in names}

    def _argument(self, name: str, value: ast.expr, known: Mapping[str, object]) -> list[str]:
        """The tokens of an argument, its numbers marked as its name says."""
        tokens = self.tokens(value)
        if tokens[0] == "[" and (name in ALIKE or (name in SIZES and len(tokens) == 3)):
            tokens = tokens[1:2] if len({*tokens[1:-1]}) == 1 else tokens
        if name in AXES:
            return marked(tokens)
        if name in UNITS:
            return ["#1" if token == "#1^" else token for token in tokens]
        sized = name in SIZES or isinstance(known.get(name), float)
        return marked(tokens, "~") if sized else tokens

    def _created(self, node: ast.Call, args: list[ast.expr], words: list[ast.keyword]) -> list[str]:
        """`torch.rand([2, 3])`, `torch.rand(2, 3)` and `torch.rand(size=(2, 3))`; every number is a
        size."""
        args += [word.value for word in words if word.arg == "size"]
        sizes = self._all(args)
        if len(args) == 1 and sizes[0] == "[":
            sizes = sizes[1:-1]
        out = ["Call", *self.tokens(node.func), *marked(sizes, "~")]
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
        elif default is not ... and marked(named.get(name, [])) == _number(default):
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
        right = ["exponent=", *marked(right)]
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
