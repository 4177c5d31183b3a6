"""A task's module taken apart: imports, constants, classes, functions. What the canonical forms and
the operator sequence read.

Guarantees: static, nothing is executed or imported; the folding of constants is bounded. Does not
follow what a module does to itself at run time (names bound under conditions count as bound once,
the last wins).
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Collection
from dataclasses import dataclass

_LARGEST = 2**63
INLINED = 200  # statements
_REPEATING = (
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)  # what they read may be read again and again
_DEEPEST = 40  # nested constants; deeper ones are left as they stand
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True, slots=True)
class Function:
    """A function or method; `parameters` in order, starred ones last."""

    node: ast.FunctionDef | ast.AsyncFunctionDef

    @property
    def body(self) -> list[ast.stmt]:
        return self.node.body

    @property
    def parameters(self) -> tuple[str, ...]:
        args = self.node.args
        starred = [star.arg for star in (args.vararg, args.kwarg) if star]
        return (*(arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)), *starred)


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
            if isinstance(node, ast.Import):
                for alias in node.names:
                    package = alias.name.partition(".")[0]
                    self.imports[alias.asname or package] = alias.name if alias.asname else package
            elif isinstance(node, ast.ImportFrom) and not node.level:
                self.imports |= {
                    alias.asname or alias.name: f"{node.module}.{alias.name}"
                    for alias in node.names
                }
        for node in module.body:
            self._define(node)
        self.defined = frozenset((*self.classes, *self.functions, *self.constants, *self.variables))
        self.entry_parameters = frozenset(self.parameters(f"{entry_point}.__init__"))

    def _define(self, node: ast.stmt) -> None:
        if isinstance(node, ast.ClassDef):
            self.classes[node.name] = node
            for child in node.body:
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                    self.functions[f"{node.name}.{child.name}"] = Function(child)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.functions[node.name] = Function(node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value:
            self._assign(node.target, node.value)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            folded = self.fold(value, ())
            self.variables[target.id] = value
            self.constants.pop(target.id, None)
            if folded is None and isinstance(value, ast.Constant) and isinstance(value.value, str):
                folded = value.value
            if folded is not None:
                self.constants[target.id] = folded
        elif isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
            for one, its in zip(target.elts, value.elts, strict=False):
                self._assign(one, its)

    def parameters(self, unit: str) -> tuple[str, ...]:
        """A function's parameters; nothing for one that is not there."""
        function = self.functions.get(unit)
        return function.parameters if function else ()

    def dotted(self, node: ast.expr) -> str | None:
        """`F.relu` as `torch.nn.functional.relu`; None for what is no imported name."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.imports:
            return None
        return ".".join((self.imports[node.id], *reversed(parts)))

    def fold(self, node: ast.expr, bound: Collection[str], depth: int = 0) -> object | None:
        """The number (or tuple of numbers) that an expression is, names not in `bound` being the
        module's constants; else None.

        A name may also stand for a string that the module assigns to it.
        """
        if depth > _DEEPEST:
            return None
        if isinstance(node, ast.Constant):
            return (
                node.value
                if isinstance(node.value, int | float) and abs(node.value) < _LARGEST
                else None
            )
        if isinstance(node, ast.Name):
            return None if node.id in bound else self.constants.get(node.id)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.fold(node.operand, bound, depth + 1)
            return -value if isinstance(value, int | float) else None
        if isinstance(node, ast.Tuple | ast.List):
            items = [self.fold(item, bound, depth + 1) for item in node.elts]
            return None if any(item is None for item in items) else tuple(items)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = (
                self.fold(node.left, bound, depth + 1),
                self.fold(node.right, bound, depth + 1),
            )
            if isinstance(left, int | float) and isinstance(right, int | float):
                try:
                    value = _OPERATORS[type(node.op)](left, right)
                except (ArithmeticError, ValueError):
                    return None
                return value if abs(value) < _LARGEST else None
        return None


def bound_names(node: ast.AST) -> frozenset[str]:
    """Names that a function binds: its parameters and whatever is assigned in it."""
    names = set()
    for child in ast.walk(node):
        if isinstance(child, ast.arg):
            names.add(child.arg)
        elif isinstance(child, ast.Name) and not isinstance(child.ctx, ast.Load):
            names.add(child.id)
    return frozenset(names)


def inlined(body: list[ast.stmt]) -> tuple[dict[int, ast.expr], list[ast.stmt]]:
    """A body without the variables that one later statement uses once, where nothing between
    changes what they are made of: `y = f(x); return y` is `return f(x)`.

    Returns what stands in for a name, by the `id` of its node, and the statements that are left.
    Bodies longer than INLINED stay.
    """
    values: dict[int, ast.expr] = {}
    if len(body) > INLINED:
        return values, body
    left = []
    mentions = [_mentions(node) for node in body]
    reads = [set(names) for names in mentions]  # grows by what is inlined into a statement
    for i, node in enumerate(body):
        target = (
            node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        )
        name = target.id if isinstance(target, ast.Name) else None
        user = next((k for k in range(i + 1, len(body)) if name in mentions[k]), None)
        load = _only_use(body[user], mentions[user][name]) if user is not None else None
        own = {
            n
            for n in reads[i]
            if n != name or any(isinstance(use.ctx, ast.Load) for use in mentions[i].get(n, ()))
        }
        if (
            load is None
            or _lives_on(name, mentions[user:])
            or not all(_leaves(body[k], own) for k in range(i + 1, user))
        ):
            left.append(node)
        else:
            values[id(load)] = node.value
            reads[user] |= own
    return values, left


def _only_use(statement: ast.stmt, uses: list[ast.Name]) -> ast.Name | None:
    """The one place where a simple statement reads a variable; None where it may read it again."""
    loads = [use for use in uses if isinstance(use.ctx, ast.Load)]
    if len(loads) != 1 or not isinstance(statement, ast.Assign | ast.Return | ast.Expr):
        return None
    return None if any(isinstance(child, _REPEATING) for child in ast.walk(statement)) else loads[0]


def _leaves(statement: ast.stmt, names: set[str]) -> bool:
    """Does a statement certainly leave variables, and what they hold, as they are? Only plain
    assignments to other names do."""
    if not isinstance(statement, ast.Assign) or not all(
        isinstance(target, ast.Name) for target in statement.targets
    ):
        return False
    stores = {target.id for target in statement.targets}
    return not stores & names and not any(
        isinstance(node, ast.Attribute) and node.attr.endswith("_") for node in ast.walk(statement)
    )


def _lives_on(name: str, later: list[dict[str, list[ast.Name]]]) -> bool:
    """Is a variable read again behind the first of the statements `later`?"""
    if any(isinstance(use.ctx, ast.Store) for use in later[0].get(name, [])):
        return False
    for mentions in later[1:]:
        if name in mentions:
            return any(isinstance(use.ctx, ast.Load) for use in mentions[name])
    return False


def _mentions(node: ast.stmt) -> dict[str, list[ast.Name]]:
    found: dict[str, list[ast.Name]] = {}
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            found.setdefault(child.id, []).append(child)
    return found


def delegate(program: Program) -> str:
    """The class that does the work: the entry point, or what it wraps and calls with its own
    arguments, or inherits without changing."""
    name, seen = program.entry, set()
    while name in program.classes and name not in seen:
        seen.add(name)
        inner = _inherited(program, name) or _wrapped(program, name)
        if inner is None:
            break
        name = inner
    return name


def _inherited(program: Program, name: str) -> str | None:
    bases = [
        base.id
        for base in program.classes[name].bases
        if isinstance(base, ast.Name) and base.id in program.classes
    ]
    own = [unit for unit in (f"{name}.forward", f"{name}.__init__") if unit in program.functions]
    return bases[0] if len(bases) == 1 and not own else None


def _wrapped(program: Program, name: str) -> str | None:
    forward, init = (
        program.functions.get(f"{name}.forward"),
        program.functions.get(f"{name}.__init__"),
    )
    if forward is None or init is None or not init.parameters or not forward.parameters:
        return None
    body = [
        node
        for node in forward.body
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    called = body[0].value if len(body) == 1 and isinstance(body[0], ast.Return) else None
    if not isinstance(called, ast.Call) or not _passes_on(called, forward):
        return None
    for node in init.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Name)
        ):
            same = any(
                ast.dump(called.func) == ast.dump(target).replace("Store()", "Load()")
                for target in node.targets
            )
            if same and node.value.func.id in program.classes and _passes_on(node.value, init):
                return node.value.func.id
    return None


def _passes_on(call: ast.Call, function: Function) -> bool:
    """Does the call hand over the function's own arguments, all of them, in order?"""
    given = [arg.value if isinstance(arg, ast.Starred) else arg for arg in call.args]
    given += [word.value for word in call.keywords]
    names = [arg.id if isinstance(arg, ast.Name) else None for arg in given]
    return names == list(function.parameters[1:])
