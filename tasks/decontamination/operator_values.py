"""The names of operators and the values that `operator_sequence` computes with.

Guarantees: one name for an operator however it is called; a tensor lists each operator that it
depends on once, operands first. To teach the reader another spelling, add it to `operators.toml`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kernels_eval.tables import table_beside
from tasks.decontamination.program import Function

MAX_TENSORS = 20_000  # tensors that one value may hold

_TABLES = table_beside(__file__, "operators.toml")
CANONICAL: Mapping[str, str] = {
    spelling: name for name, others in _TABLES["spellings"].items() for spelling in others.split()
}
VIEWS, NUMBERS, CREATION, PASSING, GROUPS = (
    frozenset(_TABLES[name].split())
    for name in ("views", "numbers", "creation", "passing", "groups")
)


def arithmetic(op: ast.AST, default: str = "") -> str:
    """The operator of a node of Python's syntax."""
    return str(_TABLES["arithmetic"].get(type(op).__name__, default))


def operator_name(name: str) -> str:
    """One name for an operator's module, function, method and in-place method: `nn.LeakyReLU`,
    `F.leaky_relu_` are `leakyrelu`."""
    squashed = name.rpartition(".")[2].replace("_", "").lower()
    squashed = squashed.removesuffix("loss") or squashed
    return CANONICAL.get(squashed, squashed)


# Values are told apart by their identity: none is compared or hashed.


class Node(NamedTuple):
    """A tensor: the operator that made it ("" for an input, a parameter, or a choice between its
    operands)."""

    operator: str = ""
    operands: tuple[Node, ...] = ()


class Layer(NamedTuple):
    """A torch module that is one operator."""

    operator: str


class Instance(NamedTuple):
    """An object of one of the program's classes."""

    name: str
    attributes: dict[str, object]


class Group(NamedTuple):
    """A list, a tuple, or a torch container."""

    items: list[object]


class Bound(NamedTuple):
    """A function of the program with the names that it sees, and its object where it is a
    method."""

    function: Function
    names: Mapping[str, object]
    owner: Instance | None = None
    unit: str = ""


class Named(NamedTuple):
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


def either(values: Iterable[object]) -> object:
    """One of several values: the only one that is known, or a choice between tensors."""
    known = list({id(value): value for value in values if value is not None}.values())
    nodes = nodes_of(Group(known))
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
