"""States that are held for long: along one axis, each line keeps a part of its own and then has one
element, or few in turn, but for what happens at a few places. What reads the last part of a line
alone, or the nearest lines, is wrong there.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from kernels_eval.config import (
    EVENT_SHARES,
    FEWEST_HELD,
    MOST_DOUBLINGS,
    MOST_EVENTS,
    OWN_PART,
    PERIODS,
)
from kernels_eval.model.copies import ORDERS, may_repeat
from kernels_eval.model.draw import Draw
from kernels_eval.protocol import InputNote


def may_hold(value: object, note: InputNote, length: int = 0, *, singular: bool) -> bool:
    """Whether elements of an argument may be any others of it, and it has an axis of this
    length."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or note.structure:
        return False
    if length and length not in value.shape:
        return False
    regular = note.vary and not singular
    return may_repeat(value, note) and not regular and not ORDERS.intersection(note.keeps)


def axes_of(value: Tensor, length: int) -> list[int]:
    return [axis for axis, size in enumerate(value.shape) if size == length]


def lengths_of(values: Sequence[Any], notes: Sequence[InputNote], *, singular: bool) -> list[int]:
    """Along how many elements states may be held."""
    pairs = zip(values, notes, strict=False)
    held = [x for x, note in pairs if may_hold(x, note, singular=singular)]
    return sorted({size for x in held for size in x.shape if size >= FEWEST_HELD})


def hold(x: Tensor, note: InputNote, draw: Draw, length: int) -> Tensor:
    """With states that are held along an axis of this length."""
    random = draw.random
    axis = random.choice(axes_of(x, length))
    lines = x.movedim(axis, 0)
    each = _each(lines, random)
    place = torch.arange(length, device=x.device).view(-1, *[1] * (x.dim() - 1))
    state, event = _state(lines, place, each, draw)
    if note.vary and random.random() < 1 / 2:
        state = state * torch.exp2(MOST_DOUBLINGS * draw.uniform(*each))
    for _ in range(MOST_EVENTS):
        at = (draw.uniform(*each) * length).long()
        happens = draw.uniform(*each) < random.choice(EVENT_SHARES)
        state = torch.where((place == at) & happens, event, state)
    if x.is_floating_point():
        state = torch.lerp(state, lines, OWN_PART)
    begins = 1 + (draw.uniform(*each) * length / 8).long()
    return torch.where(place < begins, lines, state).movedim(0, axis)


def _each(lines: Tensor, random: Random) -> list[int]:
    """The shape of what is drawn once for all lines, or for each along one other axis."""
    each = [1] * lines.dim()
    axis = random.randrange(lines.dim())
    if axis:
        each[axis] = lines.shape[axis]
    return each


def _state(lines: Tensor, place: Tensor, each: list[int], draw: Draw) -> tuple[Tensor, Tensor]:
    """Of each line its largest or least element, or few in turn; and what else happens."""
    way = draw.random.choice(("turns", "largest", "least"))
    if way != "turns":
        least, largest = lines.aminmax(dim=0, keepdim=True)
        return (largest, least) if way == "largest" else (least, largest)
    periods = torch.tensor(PERIODS, device=lines.device)
    period = periods[(draw.uniform(*each) * len(PERIODS)).long()]
    first = (draw.uniform(*each) * len(lines)).long()
    return lines.take_along_dim((first + place % period) % len(lines), 0), lines
