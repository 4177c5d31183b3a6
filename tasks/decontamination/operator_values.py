"""The names of operators and the values that `operator_sequence` computes with.

Guarantees: one name for an operator however it is called; a tensor lists each operator that it
depends on once, operands first. To teach the reader another spelling, add it to a table here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tasks.decontamination.program import Function

MAX_TENSORS = 20_000  # tensors that one value may hold

SPELLINGS = {
    "mul": "multiply",
    "div": "divide truediv truedivide",
    "sub": "subtract",
    "matmul": "mm bmm mv dot",
    "cat": "concat concatenate",
    "transpose": "permute t mt swapaxes",
    "clamp": "clip",
    "abs": "absolute",
    "neg": "negative",
    "pow": "power",
    "gt": "greater",
    "lt": "less",
    "batchnorm": "batchnorm1d batchnorm2d batchnorm3d",
    "instancenorm": "instancenorm1d instancenorm2d instancenorm3d",
}
CANONICAL = {spelling: name for name, others in SPELLINGS.items() for spelling in others.split()}
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
    r"(zeros|ones|empty|full|rand|randn|randint|arange|linspace|eye|tensor|parameter|buffer"
    r"|generator)(like)?\Z"
)
PASSING = frozenset("list tuple reversed iter next enumerate zip dict".split())
GROUPS = frozenset("sequential modulelist moduledict parameterlist".split())
ARITHMETIC: dict[type[ast.AST], str] = {
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
    return CANONICAL.get(squashed, squashed)


@dataclass(slots=True, eq=False)
class Node:
    """A tensor: the operator that made it ("" for an input, a parameter, or a choice between its
    operands)."""

    operator: str = ""
    operands: tuple[Node, ...] = ()


@dataclass(slots=True, eq=False)
class Layer:
    """A torch module that is one operator."""

    operator: str


@dataclass(slots=True, eq=False)
class Instance:
    """An object of one of the program's classes."""

    name: str
    attributes: dict[str, object] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Group:
    """A list, a tuple, or a torch container."""

    items: list[object]


@dataclass(slots=True, eq=False)
class Method:
    """A function of the program, bound to its object where it is a method."""

    unit: str
    owner: Instance | None = None


@dataclass(slots=True, eq=False)
class Closure:
    """A function defined in a function, with the names that it sees."""

    function: Function
    names: dict[str, object]


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


def nodes_of(value: object) -> list[Node]:
    """The tensors in a value. A module in a list is none; lists in lists are followed."""
    stack, found = [value], list[Node]()
    while stack:
        item = stack.pop()
        if isinstance(item, Node):
            found.append(item)
        elif isinstance(item, Group) and len(found) < MAX_TENSORS:
            stack += reversed(item.items)
    return found


def either(values: Sequence[object]) -> object:
    """One of several values: the only one that is known, or a choice between tensors."""
    known = list({id(value): value for value in values if value is not None}.values())
    nodes = [node for value in known for node in nodes_of(value)]
    if len(known) > 1 and nodes:
        return Node("", tuple(nodes))
    return known[0] if known else None


def listed(result: object) -> Iterable[str]:
    """Operators in post-order, each tensor once."""
    seen: set[int] = set()
    stack = [(node, False) for node in reversed(nodes_of(result))]
    while stack:
        node, done = stack.pop()
        if done:
            yield node.operator
        elif id(node) not in seen:
            seen.add(id(node))
            if node.operator:
                stack.append((node, True))
            stack += [(operand, False) for operand in reversed(node.operands)]
