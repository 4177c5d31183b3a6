"""What a call takes and leaves behind, as tensors and Python's values: also what lies in objects,
and NumPy's arrays, which are tensors here.

Objects are those of classes that a task defines, of dataclasses and of `SimpleNamespace`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

TASK_MODULE = "task"
"""The name under which a task's source is loaded."""
PLAIN = frozenset({Tensor, nn.Parameter, int, float, bool, str, bytes, complex, type(None)})
CLOSED = (type, Tensor, nn.Module, Enum, dict, list, tuple, set, frozenset, np.ndarray)
Names = frozenset[tuple[str, str]]
"""Attributes, each with the name of its class."""


class Opened(NamedTuple):
    """An object whose attributes of these names are leaves, or an array, which has none."""

    value: Any
    names: tuple[str, ...] = ()
    form: Form | None = None


class Form(NamedTuple):
    """How leaves make up values: containers, and what is opened, by its place in these."""

    spec: TreeSpec
    opened: dict[int, Opened]

    @property
    def size(self) -> int:
        """How many leaves it has."""
        inside = [each.form.size - 1 for each in self.opened.values() if each.form]
        return self.spec.num_leaves + sum(inside)


class Cycle(Exception):
    """An object holds itself: it stays closed."""


def flattened(
    values: Any, known: Names | None = None, within: frozenset[int] = frozenset()
) -> tuple[list[Any], Form]:
    """Leaves of nested values in order. `known`: of names that begin with an underscore, these
    alone; `within`: objects that these values are part of."""
    parts, spec = tree_flatten(values)
    if all(type(x) in PLAIN for x in parts):
        return parts, Form(spec, {})
    leaves, opened = list[Any](), dict[int, Opened]()
    for place, x in enumerate(parts):
        if is_array(x):
            opened[place] = Opened(x)
            leaves.append(as_tensor(x))
        elif is_object(x) and (found := _inside(x, known, within)):
            leaves += found[0]
            opened[place] = found[1]
        else:
            leaves.append(x)
    return leaves, Form(spec, opened)


def _inside(x: Any, known: Names | None, within: frozenset[int]) -> tuple[list[Any], Opened] | None:
    """An object's leaves; None where it is part of itself."""
    if id(x) in within:
        raise Cycle
    names = tuple(name for name in attributes_of(x) if _is_visible(x, name, known))
    held = [getattr(x, name) for name in names]
    try:
        leaves, form = flattened(held, known, within | {id(x)})
    except Cycle:
        if within:
            raise
        return None
    return leaves, Opened(x, names, form)


def arrays_in(form: Form, start: int = 0) -> list[int]:
    """Which leaves are NumPy's arrays."""
    found, at = list[int](), start
    for place in range(form.spec.num_leaves):
        opened = form.opened.get(place)
        if opened and opened.form:
            found += arrays_in(opened.form, at)
            at += opened.form.size
        else:
            found += [at] * (opened is not None)
            at += 1
    return found


def rebuilt(leaves: list[Any], form: Form) -> Any:
    """New values of this form."""
    parts, _ = _taken(leaves, form)
    return parts


def leaves_of(values: Any) -> list[Any]:
    return flattened(values)[0]


def mapped_values(change: Callable[[Any], Any], values: Any) -> Any:
    """New containers and objects, with each leaf changed."""
    leaves, form = flattened(values)
    return rebuilt(list(map(change, leaves)), form)


def map_tensors(change: Callable[[Tensor], Tensor], values: Any) -> Any:
    return mapped_values(lambda x: change(x) if isinstance(x, Tensor) else x, values)


def _taken(leaves: list[Any], form: Form) -> tuple[Any, list[Any]]:
    """Values of this form from the first leaves, and the leaves that are left."""
    parts = list[Any]()
    for place in range(form.spec.num_leaves):
        found = form.opened.get(place)
        if found is None:
            part, leaves = leaves[0], leaves[1:]
        elif found.form is None:
            part, leaves = leaves[0].detach().cpu().numpy(), leaves[1:]
        else:
            held, leaves = _taken(leaves, found.form)
            part = copy.copy(found.value)
            for name, value in zip(found.names, held, strict=True):
                object.__setattr__(part, name, value)  # also a frozen one's
        parts.append(part)
    return tree_unflatten(parts, form.spec), leaves


def is_array(x: object) -> bool:
    """Whether it is an array of numbers that torch has, too."""
    return type(x) is np.ndarray and x.dtype.kind in "biufc" and _has_type(x)


def _has_type(x: Any) -> bool:
    try:
        torch.from_numpy(np.empty(0, x.dtype))
    except TypeError:
        return False
    return True


def as_tensor(x: Any) -> Tensor:
    """The array's memory, where torch can use it."""
    usable = x.flags.writeable and all(step >= 0 for step in x.strides)
    return torch.from_numpy(x if usable else x.copy())


def is_object(x: object) -> bool:
    """Whether it is an object whose attributes count."""
    if isinstance(x, CLOSED):
        return False
    if dataclasses.is_dataclass(x) or type(x) is SimpleNamespace:
        return True
    return type(x).__module__ == TASK_MODULE and hasattr(x, "__dict__")


def attributes_of(x: Any) -> list[str]:
    if hasattr(x, "__dict__"):
        return sorted(vars(x))
    return [field.name for field in dataclasses.fields(x) if hasattr(x, field.name)]  # slots


def names_of(values: Any) -> Names:
    """Attributes of the objects among values."""
    _, form = flattened(values)
    return frozenset(_names_in(form))


def _names_in(form: Form) -> list[tuple[str, str]]:
    found = list[tuple[str, str]]()
    for each in form.opened.values():
        found += [(type(each.value).__name__, name) for name in each.names]
        found += _names_in(each.form) if each.form else []
    return found


def _is_visible(x: object, name: str, known: Names | None) -> bool:
    """What a call keeps for itself in an attribute of an underscore is no result of it."""
    return known is None or not name.startswith("_") or (type(x).__name__, name) in known


def results_in(values: Any, known: Collection[tuple[str, str]]) -> list[Tensor]:
    """Tensors and numbers (as tensors) that a call has left in values."""
    leaves, _ = flattened(values, frozenset(known))
    return [x for x in map(_result, leaves) if x is not None]


def _result(x: Any) -> Tensor | None:
    if isinstance(x, Tensor):
        return x.detach().clone()
    if isinstance(x, bool | int | float | complex):
        return torch.tensor(x, dtype=torch.float64 if type(x) is float else None)
    if isinstance(x, np.number | np.bool_):
        return _result(x.item())
    if isinstance(x, str | bytes):
        return torch.tensor(list(x.encode() if isinstance(x, str) else x), dtype=torch.uint8)
    return None
