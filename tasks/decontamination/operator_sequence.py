"""The torch operators that reach the output of a task, read from its source.

Guarantees: static (nothing is executed); the same sequence for `nn.ReLU()(x)`, `F.relu(x)`,
`torch.relu(x)`, `x.relu_()`, for a forward cut into helper methods, a module in a module,
statements in another order, and operators whose result is not used; bounded work; None where the
source does not parse or exceeds the bounds. Views, copies, casts, creation and arithmetic on
numbers are no operators, as in `operators.operator_kind`; transposition is one. Does not guarantee
what runs: both branches of a condition count, a loop over a number counts once, and names patched
or fetched dynamically are not seen.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence

from tasks.decontamination.operator_values import (
    ARITHMETIC,
    CREATION,
    GROUPS,
    NUMBERS,
    PASSING,
    Closure,
    Group,
    Instance,
    Layer,
    Method,
    Named,
    Node,
    either,
    listed,
    operation,
    operator_name,
)
from tasks.decontamination.program import Function, Program

STEPS = 20_000  # expressions looked at, calls inlined
DEPTH = 24  # calls inside calls
_UNROLLED = 32


def operator_sequence(program: Program | None) -> tuple[str, ...] | None:
    """Operators in the order in which they compute the output: each once, its operands before it.
    None where it cannot be read."""
    if (
        program is None
        or f"{program.entry}.forward" not in program.functions
        and program.entry not in program.classes
    ):
        return None
    try:
        reader = _Reader(program)
        result = reader.call(reader.construct(program.entry, []), [Node("") for _ in range(8)])
        return tuple(listed(result))
    except (_TooMuchError, RecursionError):
        return None


class _TooMuchError(Exception):
    pass


class _Reader:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.steps = 0
        self.depth = 0

    def construct(self, name: str, args: Sequence[object]) -> Instance:
        instance = Instance(name)
        unit = self._method(name, "__init__")
        if unit:
            self.function(unit, [instance, *args])
        return instance

    def call(self, called: object, args: Sequence[object]) -> object:
        """The value of a call of a value."""
        if isinstance(called, Layer):
            return operation(called.operator, args)
        if isinstance(called, Group):  # a torch Sequential
            value: object = args[0] if args else None
            for item in called.items:
                value = self.call(item, [value])
            return value
        if isinstance(called, Instance):
            unit = self._method(called.name, "forward")
            if unit:
                return self.function(unit, [called, *args])
            return (
                self.call(called.attributes.get(""), args)
                if "" in called.attributes
                else operation(called.name.lower(), args)
            )
        if isinstance(called, Method):
            return self.function(called.unit, [called.owner, *args] if called.owner else args)
        if isinstance(called, Closure):
            return self._run(called.function, args, "", called.env)
        if isinstance(called, Named):
            return self._imported(called.name, args)
        return operation("", args) if called is None else called

    def function(self, unit: str, args: Sequence[object]) -> object:
        return self._run(self.program.functions[unit], args, unit, {})

    def _run(
        self, function: Function, args: Sequence[object], unit: str, outer: dict[str, object]
    ) -> object:
        self.depth += 1
        if self.depth > DEPTH:
            raise _TooMuchError
        env: dict[str, object] = dict(outer)
        env |= dict.fromkeys(function.parameters)
        env |= dict(zip(function.parameters, args, strict=False))
        rest = [value for value in args[len(function.node.args.args) :] if value is not None]
        if function.node.args.vararg:
            env[function.node.args.vararg.arg] = Group(rest)
        returned: list[object] = []
        self._block(function.body, env, returned, unit)
        self.depth -= 1
        return either(returned)

    def _method(self, name: str, method: str) -> str | None:
        """Where a class, or what it inherits from, defines a method."""
        for _ in range(DEPTH):
            if f"{name}.{method}" in self.program.functions:
                return f"{name}.{method}"
            node = self.program.classes.get(name)
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)] if node else []
            if not bases:
                return None
            name = bases[0]
        return None

    def _block(
        self, body: Iterable[ast.stmt], env: dict[str, object], returned: list[object], unit: str
    ) -> None:
        for node in body:
            if isinstance(node, ast.Return):
                returned.append(self._value(node.value, env, unit))
            elif isinstance(node, ast.Assign):
                value = self._value(node.value, env, unit)
                for target in node.targets:
                    self._bind(target, value, env, unit)
            elif isinstance(node, ast.AnnAssign):
                self._bind(node.target, self._value(node.value, env, unit), env, unit)
            elif isinstance(node, ast.AugAssign):
                self._augmented(node, env, unit)
            elif isinstance(node, ast.Expr):
                self._effect(node.value, env, unit)
            elif isinstance(node, ast.If):
                self._branches([node.body, node.orelse], env, returned, unit)
            elif isinstance(node, ast.For):
                self._loop(node, env, returned, unit)
            elif isinstance(node, ast.FunctionDef):
                env[node.name] = Closure(Function(node), env)
            elif isinstance(node, ast.While | ast.With | ast.Try):
                self._block(node.body, env, returned, unit)

    def _augmented(self, node: ast.AugAssign, env: dict[str, object], unit: str) -> None:
        left, right = self._value(node.target, env, unit), self._value(node.value, env, unit)
        if isinstance(left, Group):
            left.items.extend(right.items if isinstance(right, Group) else [right])
        else:
            self._bind(
                node.target,
                operation(ARITHMETIC.get(type(node.op), "binary"), [left, right]),
                env,
                unit,
            )

    def _effect(self, node: ast.expr, env: dict[str, object], unit: str) -> None:
        """A statement that is a call: in-place methods change the variable that they are called
        on."""
        value = self._value(node, env, unit)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and re.search(r"[^_]_\Z", node.func.attr)
        ):
            if isinstance(node.func.value, ast.Name) and isinstance(value, Node):
                env[node.func.value.id] = value

    def _branches(
        self,
        bodies: list[list[ast.stmt]],
        env: dict[str, object],
        returned: list[object],
        unit: str,
    ) -> None:
        outcomes = []
        for body in bodies:
            outcomes.append(dict(env))
            self._block(body, outcomes[-1], returned, unit)
        for name in {name: None for outcome in outcomes for name in outcome}:
            env[name] = either([outcome.get(name) for outcome in outcomes])

    def _loop(
        self, node: ast.For, env: dict[str, object], returned: list[object], unit: str
    ) -> None:
        for item in self._items(self._value(node.iter, env, unit)):
            self._bind(node.target, item, env, unit)
            self._block(node.body, env, returned, unit)

    def _items(self, value: object) -> list[object]:
        return value.items[:_UNROLLED] if isinstance(value, Group) else [value]

    def _bind(self, target: ast.expr, value: object, env: dict[str, object], unit: str) -> None:
        if isinstance(target, ast.Name):
            env[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            parts = (
                value.items
                if isinstance(value, Group) and len(value.items) == len(target.elts)
                else [value] * len(target.elts)
            )
            for one, part in zip(target.elts, parts, strict=True):
                self._bind(one, part, env, unit)
        elif isinstance(target, ast.Attribute):
            owner = self._value(target.value, env, unit)
            if isinstance(owner, Instance):
                owner.attributes[target.attr] = value
        elif isinstance(target, ast.Subscript):
            base = self._value(target.value, env, unit)
            if isinstance(base, Node):
                self._bind(target.value, operation("setitem", [base, value]), env, unit)

    def _value(self, node: ast.expr | None, env: dict[str, object], unit: str) -> object:
        """A value, or None for numbers, strings and what is not known."""
        self.steps += 1
        if self.steps > STEPS:
            raise _TooMuchError
        if isinstance(node, ast.Name):
            return env[node.id] if node.id in env else self._global(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, env, unit)
        if isinstance(node, ast.Call):
            return self._call(node, env, unit)
        if isinstance(node, ast.BinOp):
            left, right = self._value(node.left, env, unit), self._value(node.right, env, unit)
            if isinstance(left, Group) or isinstance(right, Group):
                return Group(
                    [
                        item
                        for side in (left, right)
                        if isinstance(side, Group)
                        for item in side.items
                    ]
                )
            return operation(ARITHMETIC.get(type(node.op), "binary"), [left, right])
        if isinstance(node, ast.UnaryOp):
            return operation(
                ARITHMETIC.get(type(node.op), ""), [self._value(node.operand, env, unit)]
            )
        if isinstance(node, ast.Compare):
            sides = [self._value(side, env, unit) for side in (node.left, *node.comparators)]
            return (
                operation(ARITHMETIC[type(node.ops[0])], sides)
                if type(node.ops[0]) in ARITHMETIC
                else None
            )
        if isinstance(node, ast.IfExp):
            return either([self._value(node.body, env, unit), self._value(node.orelse, env, unit)])
        if isinstance(node, ast.BoolOp):
            return either([self._value(value, env, unit) for value in node.values])
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return Group(self._arguments(node.elts, env, unit))
        if isinstance(node, ast.Dict):
            return Group([self._value(value, env, unit) for value in node.values])
        if isinstance(node, ast.ListComp | ast.GeneratorExp):
            return self._comprehension(node, env, unit)
        if isinstance(node, ast.Subscript):
            return self._item(node, env, unit)
        return (
            self._value(node.value, env, unit)
            if isinstance(node, ast.Starred | ast.Await | ast.NamedExpr)
            else None
        )

    def _comprehension(
        self, node: ast.ListComp | ast.GeneratorExp, env: dict[str, object], unit: str
    ) -> Group:
        inner, out = dict(env), []
        for generator in node.generators[1:]:
            self._bind(generator.target, None, inner, unit)
        for item in self._items(self._value(node.generators[0].iter, env, unit)):
            self._bind(node.generators[0].target, item, inner, unit)
            out.append(self._value(node.elt, inner, unit))
        return Group(out)

    def _item(self, node: ast.Subscript, env: dict[str, object], unit: str) -> object:
        base = self._value(node.value, env, unit)
        if not isinstance(base, Group):
            return base if isinstance(base, Node) else None
        index = self.program.fold(node.slice, env)
        if isinstance(index, int) and -len(base.items) <= index < len(base.items):
            return base.items[index]
        return base if isinstance(node.slice, ast.Slice) else either(base.items)

    def _global(self, name: str) -> object:
        if name in self.program.imports:
            return Named(self.program.imports[name])
        if name in self.program.functions:
            return Method(name, None)
        return (
            Named(name)
            if name in self.program.classes or name in PASSING or name == "super"
            else None
        )

    def _attribute(self, node: ast.Attribute, env: dict[str, object], unit: str) -> object:
        dotted = self.program.dotted(node)
        if dotted and dotted.partition(".")[0] not in env:
            return Named(dotted)
        owner = self._value(node.value, env, unit)
        if isinstance(owner, Instance):
            if node.attr in owner.attributes:
                return owner.attributes[node.attr]
            method = self._method(owner.name, node.attr)
            return Method(method, owner) if method else None
        if isinstance(owner, Layer):
            return Node("")
        if isinstance(owner, Node):
            return (
                operation("transpose", [owner])
                if node.attr in ("T", "mT")
                else None
                if node.attr in NUMBERS
                else owner
            )
        return None

    def _arguments(
        self, nodes: Iterable[ast.expr], env: dict[str, object], unit: str
    ) -> list[object]:
        out: list[object] = []
        for node in nodes:
            value = self._value(node, env, unit)
            out += (
                value.items
                if isinstance(node, ast.Starred) and isinstance(value, Group)
                else [value]
            )
        return out

    def _call(self, node: ast.Call, env: dict[str, object], unit: str) -> object:
        args = self._arguments(node.args, env, unit) + [
            self._value(word.value, env, unit) for word in node.keywords
        ]
        func = node.func
        if isinstance(func, ast.Attribute) and not self.program.dotted(func):
            if func.attr == "__init__":
                return self._inherited_init(args, env, unit)
            owner = self._value(func.value, env, unit)
            if isinstance(owner, Node):
                return operation(func.attr, [owner, *args])
            if isinstance(owner, Group):
                return self._container(owner, func.attr, args)
            if isinstance(owner, Instance) and func.attr == "add_module":
                self._sequence(owner).items.append(args[-1])
                return None
            if owner is None:
                return operation(func.attr, args)
        return self.call(self._value(func, env, unit), args)

    def _inherited_init(self, args: Sequence[object], env: dict[str, object], unit: str) -> None:
        """`super().__init__(...)`: a base of the program is constructed, a torch Sequential takes
        its layers."""
        name = unit.partition(".")[0]
        node, owner = self.program.classes.get(name), next(iter(env.values()), None)
        if node is None or not isinstance(owner, Instance):
            return
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in self.program.classes:
                inherited = self._method(base.id, "__init__")
                if inherited:
                    self.function(inherited, [owner, *args])
            elif operator_name(self.program.dotted(base) or "") in GROUPS:
                self._sequence(owner).items.extend(arg for arg in args if arg is not owner)

    @staticmethod
    def _sequence(owner: Instance) -> Group:
        group = owner.attributes.setdefault("", Group([]))
        return group if isinstance(group, Group) else Group([])

    @staticmethod
    def _container(group: Group, method: str, args: Sequence[object]) -> object:
        if method in ("append", "add_module", "insert"):
            group.items.extend(args[-1:])
        elif method == "extend" and args and isinstance(args[0], Group):
            group.items.extend(args[0].items)
        elif method in ("values", "items", "copy"):
            return group
        elif method == "pop":
            return group.items[-1] if group.items else None
        return None

    def _imported(self, name: str, args: Sequence[object]) -> object:
        if name in self.program.classes:
            return self.construct(name, args)
        last = name.rpartition(".")[2]
        operator = operator_name(last)
        if operator in GROUPS:
            return Group(
                args[0].items if len(args) == 1 and isinstance(args[0], Group) else list(args)
            )
        if name in PASSING:
            return (
                Group(
                    [
                        item
                        for arg in args
                        for item in (arg.items if isinstance(arg, Group) else [arg])
                    ]
                )
                if args
                else Group([])
            )
        if CREATION.match(operator):
            return Node("")
        if last[:1].isupper():
            return Layer(operator)
        return operation(operator, args)
