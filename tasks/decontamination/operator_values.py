"""The names of operators and the values that `operator_sequence` computes with.

Guarantees: one name for an operator however it is called; a tensor lists each operator that it
depends on once, operands first.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tasks.decontamination.program import Function

MOST = 20_000  # tensors that one value may hold

_SAME = {
    "multiply": "mul",
    "divide": "div",
    "truediv": "div",
    "truedivide": "div",
    "subtract": "sub",
    "mm": "matmul",
    "bmm": "matmul",
    "mv": "matmul",
    "dot": "matmul",
    "concat": "cat",
    "concatenate": "cat",
    "permute": "transpose",
    "t": "transpose",
    "mt": "transpose",
    "swapaxes": "transpose",
    "clip": "clamp",
    "absolute": "abs",
    "negative": "neg",
    "power": "pow",
    "greater": "gt",
    "less": "lt",
    "hardswish": "hardswish",
    "layernorm": "layernorm",
    "batchnorm1d": "batchnorm",
    "batchnorm2d": "batchnorm",
    "batchnorm3d": "batchnorm",
    "instancenorm1d": "instancenorm",
    "instancenorm2d": "instancenorm",
    "instancenorm3d": "instancenorm",
}
VIEWS = frozenset(
    "view reshape flatten unflatten contiguous unsqueeze squeeze expand expandas viewas to float"
    " double half bfloat16 long int bool type typeas clone detach cpu cuda requiresgrad identity"
    " select narrow asstrided cast checkpoint".split()
)
NUMBERS = frozenset(
    "size dim numel item shape device dtype ndim ndimension isinstance len int str range print"
    " stride isgrad".split()
)
CREATION = re.compile(
    r"(zeros|ones|empty|full|rand|randn|randint|arange|linspace|eye|tensor|parameter|buffer|generator)(like)?\Z"
)
PASSING = frozenset("list tuple reversed iter next enumerate zip dict".split())
GROUPS = frozenset("sequential modulelist moduledict parameterlist".split())
ARITHMETIC = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.MatMult: "matmul",
    ast.Pow: "pow",
    ast.FloorDiv: "floordivide",
    ast.Mod: "remainder",
    ast.USub: "neg",
    ast.Gt: "gt",
    ast.Lt: "lt",
    ast.GtE: "ge",
    ast.LtE: "le",
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.BitAnd: "logicaland",
    ast.BitOr: "logicalor",
    ast.Invert: "logicalnot",
}


def operator_name(name: str) -> str:
    """One name for an operator's module, function, method and in-place method: `nn.LeakyReLU`,
    `F.leaky_relu_` are `leakyrelu`."""
    squashed = name.rpartition(".")[2].replace("_", "").lower()
    squashed = squashed.removesuffix("loss") or squashed
    return _SAME.get(squashed, squashed)


@dataclass(slots=True, eq=False)
class Node:
    """A tensor: the operator that made it ("" for an input, a parameter, or a choice between its
    operands)."""

    operator: str
    operands: tuple[Node, ...] = ()


@dataclass(slots=True, eq=False)
class Layer:
    operator: str


@dataclass(slots=True, eq=False)
class Instance:
    name: str
    attributes: dict[str, object] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Group:
    """A list, a tuple, or a torch container."""

    items: list[object]


@dataclass(slots=True, eq=False)
class Method:
    unit: str
    owner: Instance | None


@dataclass(slots=True, eq=False)
class Closure:
    """A function defined in a function, with the names that it sees."""

    function: Function
    env: dict[str, object]


@dataclass(slots=True, eq=False)
class Named:
    """Something imported, by its full name."""

    name: str


def operation(name: str, args: Sequence[object]) -> Node | None:
    """The tensor that an operator makes of its tensors; None where there are none (arithmetic on
    numbers)."""
    operator = operator_name(name)
    operands = tuple(node for arg in args for node in nodes_of(arg))
    if not operands or operator in NUMBERS:
        return None
    return operands[0] if operator in VIEWS else Node(operator, operands)


def nodes_of(value: object) -> Iterable[Node]:
    """The tensors in a value. A module in a list is none; lists in lists are followed."""
    stack, found = [value], []
    while stack:
        item = stack.pop()
        if isinstance(item, Node):
            found.append(item)
        elif isinstance(item, Group) and len(found) < MOST:
            stack.extend(reversed(item.items))
    return found


def either(values: Sequence[object]) -> object:
    """One of several values: the only one that is known, or a choice between tensors."""
    known = [
        value
        for i, value in enumerate(values)
        if value is not None and not any(value is other for other in values[:i])
    ]
    if not known:
        return None
    nodes = [node for value in known for node in nodes_of(value)]
    return Node("", tuple(nodes)) if len(known) > 1 and nodes else known[0]


def listed(result: object) -> Iterable[str]:
    """Operators in post-order, each tensor once."""
    seen: set[int] = set()
    stack: list[tuple[Node, bool]] = [(node, False) for node in reversed(list(nodes_of(result)))]
    while stack:
        node, done = stack.pop()
        if done:
            yield node.operator
        elif id(node) not in seen:
            seen.add(id(node))
            if node.operator:
                stack.append((node, True))
            stack.extend((operand, False) for operand in reversed(node.operands))
