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
from dataclasses import dataclass, field, replace

from tasks.decontamination.operator_values import (
    CREATION,
    GROUPS,
    NUMBERS,
    PASSING,
    Bound,
    Group,
    Instance,
    Layer,
    Named,
    Node,
    arithmetic,
    either,
    listed,
    operation,
    operator_name,
)
from tasks.decontamination.program import Function, Program, parameters_of

MAX_STEPS = 20_000  # expressions looked at
MAX_DEPTH = 24  # calls inside calls
MAX_UNROLLED = 32  # turns of a loop over a list
FORWARD_ARGUMENTS = 8  # tensors that a forward is called with; more than any task declares


def operator_sequence(program: Program | None) -> tuple[str, ...] | None:
    """Operators in the order in which they compute the output: each once, its operands before it.
    None where it cannot be read."""
    if program is None or not {f"{program.entry}.forward", program.entry} & program.defined:
        return None
    try:
        reader = _Reader(program)
        inputs = [Node() for _ in range(FORWARD_ARGUMENTS)]
        return tuple(listed(reader.call(reader.construct(program.entry, []), inputs)))
    except (_TooMuchError, RecursionError):
        return None


class _TooMuchError(Exception):
    """A program exceeds the bounds."""


@dataclass(slots=True)
class _Frame:
    """One call of a function: the values of its names, the function's unit, what it returned."""

    names: dict[str, object]
    unit: str = ""
    returned: list[object] = field(default_factory=list)


class _Reader:
    """Calls functions with symbolic values. A value is None for numbers, strings and whatever is
    not known."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.steps = 0
        self.depth = 0

    def construct(self, name: str, args: Sequence[object]) -> Instance:
        instance = Instance(name, {})
        if init := self._method(name, "__init__", instance):
            self.call(init, args)
        return instance

    def call(self, called: object, args: Sequence[object]) -> object:
        """The value of a call of a value."""
        match called:
            case Layer(operator):
                return operation(operator, args)
            case Group(items):  # a torch Sequential
                value = args[0] if args else None
                for item in items:
                    value = self.call(item, [value])
                return value
            case Instance(name, attributes):
                if forward := self._method(name, "forward", called):
                    return self.call(forward, args)
                if "" in attributes:
                    return self.call(attributes[""], args)
                return operation(name.lower(), args)
            case Bound(function, names, owner, unit):
                given = [owner, *args] if owner else args
                return self._run(function, given, _Frame(dict(names), unit))
            case Named(name):
                return self._imported(name, args)
            case None:
                return operation("", args)
        return called

    def _run(self, function: Function, args: Sequence[object], frame: _Frame) -> object:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _TooMuchError
        names, declared = parameters_of(function), function.args
        frame.names |= dict.fromkeys(names) | dict(zip(names, args, strict=False))
        if declared.vararg:
            rest = args[len(declared.args) :]
            frame.names[declared.vararg.arg] = Group([arg for arg in rest if arg is not None])
        self._block(function.body, frame)
        self.depth -= 1
        return either(frame.returned)

    def _method(self, name: str, method: str, owner: Instance) -> Bound | None:
        """A method that a class, or what it inherits from, defines."""
        for _ in range(MAX_DEPTH):
            unit = f"{name}.{method}"
            if unit in self.program.functions:
                return Bound(self.program.functions[unit], {}, owner, unit)
            bases = self.program.bases(name)
            if not bases:
                return None
            name = bases[0]
        return None

    # -- statements --------------------------------------------------------------------------------

    def _block(self, body: Iterable[ast.stmt], frame: _Frame) -> None:
        for node in body:
            self._statement(node, frame)

    def _statement(self, node: ast.stmt, frame: _Frame) -> None:
        match node:
            case ast.Return(value):
                frame.returned.append(self._value(value, frame))
            case ast.Assign(targets, value):
                assigned = self._value(value, frame)
                for target in targets:
                    self._bind(target, assigned, frame)
            case ast.AnnAssign(target, value=value):
                self._bind(target, self._value(value, frame), frame)
            case ast.AugAssign(target, op, value):
                left, right = self._value(target, frame), self._value(value, frame)
                if isinstance(left, Group):
                    left.items.extend(right.items if isinstance(right, Group) else [right])
                else:
                    self._bind(target, operation(arithmetic(op, "binary"), [left, right]), frame)
            case ast.Expr(value):
                self._effect(value, frame)
            case ast.If(_, body, orelse):
                self._branches(body, orelse, frame)
            case ast.For(target, iterated, body):
                for item in _items(self._value(iterated, frame)):
                    self._bind(target, item, frame)
                    self._block(body, frame)
            case ast.FunctionDef(name):
                frame.names[name] = Bound(node, frame.names)
            case ast.While() | ast.With() | ast.Try():
                self._block(node.body, frame)

    def _effect(self, node: ast.expr, frame: _Frame) -> None:
        """A statement that is a call: in-place methods change the variable that they are called
        on."""
        value = self._value(node, frame)
        match node:
            case ast.Call(ast.Attribute(ast.Name(name), method)):
                if re.search(r"[^_]_\Z", method) and isinstance(value, Node):
                    frame.names[name] = value

    def _branches(
        self, body: Sequence[ast.stmt], orelse: Sequence[ast.stmt], frame: _Frame
    ) -> None:
        outcomes = []
        for branch in (body, orelse):
            inner = replace(frame, names=dict(frame.names))
            self._block(branch, inner)
            outcomes.append(inner.names)
        for name in outcomes[0] | outcomes[1]:
            frame.names[name] = either(outcome.get(name) for outcome in outcomes)

    def _bind(self, target: ast.expr, value: object, frame: _Frame) -> None:
        match target:
            case ast.Name(name):
                frame.names[name] = value
            case ast.Tuple(elts) | ast.List(elts):
                fits = isinstance(value, Group) and len(value.items) == len(elts)
                parts = value.items if isinstance(value, Group) and fits else [value] * len(elts)
                for one, part in zip(elts, parts, strict=True):
                    self._bind(one, part, frame)
            case ast.Attribute(owned, name):
                owner = self._value(owned, frame)
                if isinstance(owner, Instance):
                    owner.attributes[name] = value
            case ast.Subscript(indexed):
                base = self._value(indexed, frame)
                if isinstance(base, Node):
                    self._bind(indexed, operation("setitem", [base, value]), frame)

    # -- expressions -------------------------------------------------------------------------------

    def _value(self, node: ast.expr | None, frame: _Frame) -> object:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise _TooMuchError
        match node:
            case ast.Name(name):
                return frame.names[name] if name in frame.names else self._global(name)
            case ast.Attribute():
                return self._attribute(node, frame)
            case ast.Call():
                return self._call(node, frame)
            case ast.BinOp(left, op, right):
                return _arithmetic(op, self._value(left, frame), self._value(right, frame))
            case ast.UnaryOp(op, operand):
                return operation(arithmetic(op), [self._value(operand, frame)])
            case ast.Compare(left, [op, *_], comparators):
                sides = self._values((left, *comparators), frame)
                return operation(arithmetic(op), sides) if arithmetic(op) else None
            case ast.IfExp(_, body, orelse):
                return either(self._values((body, orelse), frame))
            case ast.BoolOp(_, values):
                return either(self._values(values, frame))
            case ast.List(elts) | ast.Tuple(elts) | ast.Set(elts):
                return Group(self._arguments(elts, frame))
            case ast.Dict(_, values):
                return Group(self._values(values, frame))
            case ast.ListComp() | ast.GeneratorExp():
                return self._comprehension(node, frame)
            case ast.Subscript():
                return self._item(node, frame)
            case ast.Starred(value) | ast.Await(value) | ast.NamedExpr(value=value):
                return self._value(value, frame)
        return None

    def _values(self, nodes: Iterable[ast.expr], frame: _Frame) -> list[object]:
        return [self._value(node, frame) for node in nodes]

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp, frame: _Frame) -> Group:
        inner = replace(frame, names=dict(frame.names))
        first, *others = node.generators
        for generator in others:
            self._bind(generator.target, None, inner)
        out = []
        for item in _items(self._value(first.iter, frame)):
            self._bind(first.target, item, inner)
            out.append(self._value(node.elt, inner))
        return Group(out)

    def _item(self, node: ast.Subscript, frame: _Frame) -> object:
        base = self._value(node.value, frame)
        if not isinstance(base, Group):
            return base if isinstance(base, Node) else None
        index = self.program.fold(node.slice, frame.names)
        if isinstance(index, int) and -len(base.items) <= index < len(base.items):
            return base.items[index]
        return base if isinstance(node.slice, ast.Slice) else either(base.items)

    def _global(self, name: str) -> object:
        if name in self.program.imports:
            return Named(self.program.imports[name])
        if name in self.program.functions:
            return Bound(self.program.functions[name], {}, unit=name)
        known = name in self.program.classes or name in PASSING or name == "super"
        return Named(name) if known else None

    def _attribute(self, node: ast.Attribute, frame: _Frame) -> object:
        dotted = self.program.dotted(node)
        if dotted and dotted.partition(".")[0] not in frame.names:
            return Named(dotted)
        owner = self._value(node.value, frame)
        match owner:
            case Instance(name, attributes):
                if node.attr in attributes:
                    return attributes[node.attr]
                return self._method(name, node.attr, owner)
            case Layer():
                return Node()
            case Node() if node.attr in ("T", "mT"):
                return operation("transpose", [owner])
            case Node() if node.attr not in NUMBERS:
                return owner
        return None

    def _arguments(self, nodes: Iterable[ast.expr], frame: _Frame) -> list[object]:
        out: list[object] = []
        for node in nodes:
            value = self._value(node, frame)
            spread = isinstance(node, ast.Starred)
            out += value.items if isinstance(value, Group) and spread else [value]
        return out

    def _call(self, node: ast.Call, frame: _Frame) -> object:
        args = self._arguments(node.args, frame)
        args += self._values([word.value for word in node.keywords], frame)
        match node.func:
            case ast.Attribute(attr="__init__") if not self.program.dotted(node.func):
                self._inherited_init(args, frame)
                return None
            case ast.Attribute(owned, name) if not self.program.dotted(node.func):
                owner = self._value(owned, frame)
                match owner:
                    case Node():
                        return operation(name, [owner, *args])
                    case Group():
                        return _container(owner, name, args)
                    case Instance() if name == "add_module":
                        _sequence(owner).items.append(args[-1])
                        return None
                    case None:
                        return operation(name, args)
        return self.call(self._value(node.func, frame), args)

    def _inherited_init(self, args: Sequence[object], frame: _Frame) -> None:
        """`super().__init__(...)`: a base of the program is constructed, a torch Sequential takes
        its layers."""
        node = self.program.classes.get(frame.unit.partition(".")[0])
        owner = next(iter(frame.names.values()), None)
        if node is None or not isinstance(owner, Instance):
            return
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in self.program.classes:
                if inherited := self._method(base.id, "__init__", owner):
                    self.call(inherited, args)
            elif operator_name(self.program.dotted(base) or "") in GROUPS:
                _sequence(owner).items.extend([arg for arg in args if arg is not owner])

    def _imported(self, name: str, args: Sequence[object]) -> object:
        if name in self.program.classes:
            return self.construct(name, args)
        last = name.rpartition(".")[2]
        operator = operator_name(last)
        if operator in GROUPS:
            match args:
                case [Group(items)]:
                    return Group(items)  # the same list: what is appended later is in both
            return Group(list(args))
        if name in PASSING:
            return Group(_flat(args))
        if operator.removesuffix("like") in CREATION:
            return Node()
        return Layer(operator) if last[:1].isupper() else operation(operator, args)


def _arithmetic(op: ast.operator, left: object, right: object) -> object:
    """Lists are concatenated or repeated, tensors make a tensor."""
    if isinstance(left, Group) or isinstance(right, Group):
        return Group(_flat(side for side in (left, right) if isinstance(side, Group)))
    return operation(arithmetic(op, "binary"), [left, right])


def _flat(values: Iterable[object]) -> list[object]:
    """The values with lists replaced by their items."""
    out: list[object] = []
    for value in values:
        out += value.items if isinstance(value, Group) else [value]
    return out


def _items(value: object) -> list[object]:
    return value.items[:MAX_UNROLLED] if isinstance(value, Group) else [value]


def _sequence(owner: Instance) -> Group:
    """The layers of an object that is a torch Sequential, kept under an attribute without a
    name."""
    group = owner.attributes.setdefault("", Group([]))
    return group if isinstance(group, Group) else Group([])


def _container(group: Group, method: str, args: Sequence[object]) -> object:
    """A call of a method of a list or container."""
    if method in ("append", "add_module", "insert"):
        group.items.extend(args[-1:])
    elif method == "extend" and args and isinstance(args[0], Group):
        group.items.extend(args[0].items)
    elif method in ("values", "items", "copy"):
        return group
    elif method == "pop":
        return group.items[-1] if group.items else None
    return None
