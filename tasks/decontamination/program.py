"""The definitions of a task's module: imports, constants, classes and functions.

Read by the canonical forms (`normalise`) and by the operator sequence.

Guarantees: static, nothing is executed or imported; the folding of constants is bounded. Does not
follow what a module does to itself at run time (a name bound under conditions counts as bound once,
the last binding wins).
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from kernels_eval.grouping import grouped
from kernels_eval.source.syntax import ARITHMETIC, name_path

MAX_CONSTANT = 2**63
MAX_INLINED_STATEMENTS = 200
MAX_CONSTANT_DEPTH = 40  # constants nested deeper are not folded
# What these read may be read several times, so nothing is inlined into them.
REPEATING = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


Function = ast.FunctionDef | ast.AsyncFunctionDef


def parameters_of(function: Function | None) -> tuple[str, ...]:
    """A function's parameters in order, starred ones last; none where there is no function."""
    if function is None:
        return ()
    args = function.args
    starred = (star for star in (args.vararg, args.kwarg) if star)
    return tuple(arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs, *starred))


class Program:
    """The definitions of a module. Methods are functions named `Class.method`."""

    def __init__(self, module: ast.Module, entry_point: str) -> None:
        self.entry = entry_point
        self.imports: dict[str, str] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.functions: dict[str, Function] = {}
        self.constants: dict[str, object] = {}
        self.variables: dict[str, ast.expr] = {}
        for node in ast.walk(module):
            self._import(node)
        for statement in module.body:
            self._define(statement)
        self.constructed = False  # whether the class holds the arguments of get_init_inputs
        self.defined = frozenset((*self.classes, *self.functions, *self.constants, *self.variables))

    def _import(self, node: ast.AST) -> None:
        match node:
            case ast.Import(names):
                for alias in names:
                    package = alias.name.partition(".")[0]
                    self.imports[alias.asname or package] = alias.name if alias.asname else package
            case ast.ImportFrom(module, names, None | 0):
                for alias in names:
                    self.imports[alias.asname or alias.name] = f"{module}.{alias.name}"

    def _define(self, node: ast.stmt, owner: str = "") -> None:
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name):
                self.functions[owner + name] = node
            case ast.ClassDef(name, body=body) if not owner:
                self.classes[name] = node
                for child in body:
                    self._define(child, f"{name}.")
            case ast.Assign(targets, value) if not owner:
                for target in targets:
                    self._assign(target, value)
            case ast.AnnAssign(target, value=ast.expr() as value) if not owner:
                self._assign(target, value)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        match target, value:
            case ast.Name(name), _:
                self.variables[name] = value
                folded = self.fold(value, ())
                self.constants.pop(name, None)
                match value:
                    case ast.Constant(str(text)):
                        self.constants[name] = text
                    case _ if folded is not None:
                        self.constants[name] = folded
            case ((ast.Tuple(left) | ast.List(left)), (ast.Tuple(right) | ast.List(right))):
                for one, part in zip(left, right, strict=False):
                    self._assign(one, part)

    @cached_property
    def chain(self) -> list[str]:
        """The entry point, then the class that it wraps and calls with its own arguments, or
        inherits without changes, and so on: the last one does the work."""
        chain = [self.entry]
        while chain[-1] in self.classes:
            inner = _inherited(self, chain[-1]) or _wrapped(self, chain[-1])
            if inner is None or inner in chain:
                break
            chain.append(inner)
        return chain

    @cached_property
    def stored(self) -> Counter[str]:
        """How many places assign each attribute, of whatever object."""
        return Counter(attributes_stored(self.functions.values()))

    def bases(self, name: str) -> list[str]:
        """What a class inherits from by a name without dots."""
        node = self.classes.get(name)
        return [base.id for base in node.bases if isinstance(base, ast.Name)] if node else []

    def dotted(self, node: ast.expr) -> str | None:
        """`F.relu` as `torch.nn.functional.relu`; None for what is no imported name."""
        path = name_path(node)
        if not path or path[0] not in self.imports:
            return None
        return ".".join((self.imports[path[0]], *path[1:]))

    def fold(self, node: ast.expr, bound: Collection[str], depth: int = 0) -> object | None:
        """The number, or tuple of numbers, that an expression is; None for anything else.

        Names that are not in `bound` are the module's constants; such a name may also stand for a
        string.
        """
        if depth > MAX_CONSTANT_DEPTH:
            return None
        match node:
            case ast.Constant(int(value) | float(value)):
                return value if abs(value) < MAX_CONSTANT else None
            case ast.Name(name):
                return None if name in bound else self.constants.get(name)
            case ast.UnaryOp(ast.USub(), operand):
                negated = self.fold(operand, bound, depth + 1)
                return -negated if isinstance(negated, int | float) else None
            case ast.Tuple(elts) | ast.List(elts):
                items = tuple(self.fold(item, bound, depth + 1) for item in elts)
                return None if None in items else items
            case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
                sides = (self.fold(side, bound, depth + 1) for side in (left, right))
                return _calculated(ARITHMETIC[type(op)], *sides)
        return None


def _calculated(function: Callable[[Any, Any], Any], left: object, right: object) -> object | None:
    if not (isinstance(left, int | float) and isinstance(right, int | float)):
        return None
    try:
        value = function(left, right)
    except (ArithmeticError, ValueError):
        return None
    return value if abs(value) < MAX_CONSTANT else None


def attributes_stored(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The attribute that each assignment in some pieces of syntax changes."""
    for node in nodes:
        for each in ast.walk(node):
            if isinstance(each, ast.Attribute) and not isinstance(each.ctx, ast.Load):
                yield each.attr


def bound_names(node: ast.AST) -> frozenset[str]:
    """Names that a function binds: its parameters and whatever is assigned in it."""
    names = set()
    for child in ast.walk(node):
        match child:
            case ast.arg(name):
                names.add(name)
            case ast.Name(name, ast.Store() | ast.Del()):
                names.add(name)
    return frozenset(names)


Mentions = dict[str, list[ast.Name]]


def inlined(body: list[ast.stmt]) -> tuple[dict[int, ast.expr], list[ast.stmt]]:
    """Inline the variables that one later statement reads once: `y = f(x); return y` is `return
    f(x)`.

    A variable stays where a statement between might change what it is made of. Returns the
    expression that replaces a name, by the `id` of the name's node, and the remaining statements.
    Bodies of more than MAX_INLINED_STATEMENTS are returned as they are.
    """
    values: dict[int, ast.expr] = {}
    if len(body) > MAX_INLINED_STATEMENTS:
        return values, body
    left = []
    mentions = [_mentions(node) for node in body]
    reads = [set(names) for names in mentions]  # grows by what is inlined into a statement
    for i, node in enumerate(body):
        match node:
            case ast.Assign([ast.Name(name)], value):
                own = reads[i] if _loads(mentions[i][name]) else reads[i] - {name}
                user = next((k for k in range(i + 1, len(body)) if name in mentions[k]), None)
                load = None if user is None else _only_use(body[user], mentions[user][name])
                if (
                    user is not None
                    and load is not None
                    and not _lives_on(name, mentions[user:])
                    and all(_keeps(between, own) for between in body[i + 1 : user])
                ):
                    values[id(load)] = value
                    reads[user] |= own
                    continue
        left.append(node)
    return values, left


def _mentions(node: ast.stmt) -> Mentions:
    return grouped((child.id, child) for child in ast.walk(node) if isinstance(child, ast.Name))


def _loads(uses: list[ast.Name]) -> list[ast.Name]:
    return [use for use in uses if isinstance(use.ctx, ast.Load)]


def _only_use(statement: ast.stmt, uses: list[ast.Name]) -> ast.Name | None:
    """The one place where a simple statement reads a variable; None where it may read it again."""
    loads = _loads(uses)
    if len(loads) != 1 or not isinstance(statement, ast.Assign | ast.Return | ast.Expr):
        return None
    return None if any(isinstance(child, REPEATING) for child in ast.walk(statement)) else loads[0]


def _keeps(statement: ast.stmt, names: set[str]) -> bool:
    """Whether a statement certainly leaves these variables, and what they hold, as they are: only
    plain assignments to other names do."""
    if not isinstance(statement, ast.Assign):
        return False
    for target in statement.targets:
        if not isinstance(target, ast.Name) or target.id in names:
            return False
    return not changes_arguments(statement)


def changes_arguments(statement: ast.stmt) -> bool:
    """Whether a statement calls what changes its argument (`x.mul_`, `nn.init.constant_`)."""
    return any(
        isinstance(node, ast.Attribute) and node.attr[-1:] == "_" != node.attr[-2:-1]
        for node in ast.walk(statement)
    )


def _lives_on(name: str, later: list[Mentions]) -> bool:
    """Whether a variable is read again after the first of the statements `later`."""
    if any(isinstance(use.ctx, ast.Store) for use in later[0].get(name, [])):
        return False
    return bool(_loads(next((mentions[name] for mentions in later[1:] if name in mentions), [])))


def _inherited(program: Program, name: str) -> str | None:
    if {f"{name}.forward", f"{name}.__init__"} & program.functions.keys():
        return None
    bases = [base for base in program.bases(name) if base in program.classes]
    return bases[0] if len(bases) == 1 else None


def _wrapped(program: Program, name: str) -> str | None:
    forward = program.functions.get(f"{name}.forward")
    init = program.functions.get(f"{name}.__init__")
    if not (forward and init and parameters_of(init) and parameters_of(forward)):
        return None
    match [node for node in forward.body if not _is_constant(node)]:
        case [ast.Return(ast.Call() as called)] if _passes_on(called, forward):
            wanted = ast.dump(called.func)
        case _:
            return None
    for node in init.body:
        match node:
            case ast.Assign(targets, ast.Call(ast.Name(inner)) as made) if (
                inner in program.classes and _passes_on(made, init)
            ):
                if wanted in (ast.dump(target).replace("Store()", "Load()") for target in targets):
                    return inner
    return None


def _is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _passes_on(call: ast.Call, function: Function) -> bool:
    """Whether the call hands over all of the function's own arguments, in order."""
    args = [arg.value if isinstance(arg, ast.Starred) else arg for arg in call.args]
    given: Sequence[ast.expr] = [*args, *(word.value for word in call.keywords)]
    names = tuple(arg.id if isinstance(arg, ast.Name) else None for arg in given)
    return names == parameters_of(function)[1:]
