"""Ways in which integers and masks change."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels_eval.config import DENSITY
from kernels_eval.model.draw import Change, Draw
from kernels_eval.model.held import hold
from kernels_eval.model.redraws import OTHERWISE
from kernels_eval.model.relations import copy_slices, exchange_slices, relate
from kernels_eval.protocol import SUM, InputNote


def change_integers(x: Tensor, note: InputNote, draw: Draw) -> None:
    """Along the longest axis: along others, each place may have a range of its own."""
    lines = x.movedim(max(range(x.dim()), key=lambda axis: x.shape[axis]), 0)
    ways = INTEGERS.get(note.varied, FREE if note.varied or not note.keeps else (_nudge,))
    if SUM in note.keeps:
        ways = (partial(_transfer, beyond=True),)
    for way in draw.random.sample(ways, min(2, len(ways))):
        way(lines, draw)


def _nudge(x: Tensor, draw: Draw) -> None:
    """Some are one more or less, but for ends, where an order and what is distinct stays."""
    sign = draw.random.choice((-1, 1))
    up = x * sign
    free = up < up.amax(0)
    free[0] = free[-1] = False
    one, next_one = up[:-1], up[1:]
    free[:-1] &= (next_one != one) & (next_one != one + 1)
    free[1:] &= (one != next_one) & (one != next_one + 1)
    free &= draw.touched(x, 0)
    x += sign * (free & (draw.uniform(*x.shape) < draw.random.choice((1 / 8, 1 / 2))))


def _transfer(x: Tensor, draw: Draw, *, beyond: bool = False) -> None:
    """Some give to others what is within the range, or up to twice that: the sum stays."""
    to, like = draw.pairs(len(x))
    if draw.few:
        to = torch.cat([to, like]).unique()
    order, half = to[draw.order(len(to))], len(to) // 2
    one, other = order[:half], order[half : 2 * half]
    least, largest = x.amin(0), x.amax(0)
    if beyond:
        least, largest = least.clamp(max=1), 2 * largest
    room = torch.minimum(x[one] - least, largest - x[other])
    moved = (draw.uniform(*room.shape) * (room + 1)).to(x.dtype).minimum(room)
    x[one] -= moved
    x[other] += moved


FREE: tuple[Change, ...] = (_nudge, _transfer, exchange_slices)
INTEGERS = {"resampled": (*FREE, copy_slices), "shuffled": (exchange_slices,), "offsets": (_nudge,)}
"""Ways to change integers, by the form of their note. Others: those whose order is not kept."""


def change_one_number(x: Tensor, note: InputNote, draw: Draw) -> Tensor:
    """With some others: numbers like it, integers from 1 on below it, or of 0 and 1 the other."""
    if x.is_floating_point():
        drawn = OTHERWISE["constant"](x, draw.generator, note)
        return torch.where(draw.touched(x, draw.axis(x)), drawn, x) if x.numel() > 1 else drawn
    number = int(x.reshape(-1)[0])
    if SUM in note.keeps and x.numel() > 1:
        _transfer(x.view(-1), draw, beyond=True)
    elif number in (0, 1):
        return change_mask(x, draw) if x.numel() > 1 else 1 - x
    elif number > 1:
        lines = x.view(-1)
        to = draw.pairs(len(lines))[0] if len(lines) > 1 else slice(None)
        less = draw.random.choice((1, draw.random.randrange(1, number)))
        lines[to] -= less if len(lines) == 1 else (draw.uniform(len(lines))[to] * number).long()
    return x


def change_mask(x: Tensor, draw: Draw) -> Tensor:
    """Half of it in a low density, half in a high one, and with one at least of each number that a
    row has."""
    least, largest = x.aminmax()
    if least == largest:
        least, largest = torch.zeros_like(least), torch.ones_like(least)
    axes = [axis for axis, size in enumerate(x.shape) if size > 1]
    drawn = draw.uniform(*x.shape) < 2 ** draw.random.uniform(*DENSITY)
    parts = drawn.movedim(axes[0], 0)
    dense = draw.order(len(parts))[::2] if len(axes) > 1 else slice(draw.random.choice((0, None)))
    parts[dense] = ~parts[dense]
    own = x == largest
    drawn = _with_both(drawn, own, draw)
    drawn = torch.where(draw.touched(x, draw.axis(x)), drawn, own)
    return torch.where(drawn, largest, least)


def relate_mask(x: Tensor, others: list[Tensor], draw: Draw) -> Tensor:
    """With slices like others, and parts like those of another mask; each row that has both numbers
    has them still."""
    least, largest = x.aminmax()
    own = x == largest
    drawn = own.long()
    relate(drawn, [(other == other.amax()).long() for other in others], draw)
    return torch.where(_with_both(drawn == 1, own, draw), largest, least)


def hold_mask(x: Tensor, note: InputNote, draw: Draw, length: int) -> Tensor:
    """With states that are held; each row that has both numbers has them still, one at its
    start."""
    least, largest = x.aminmax()
    own = x == largest
    drawn = hold(x, note, draw, length) == largest
    return torch.where(_with_both(drawn, own, None), largest, least)


def _with_both(drawn: Tensor, own: Tensor, draw: Draw | None) -> Tensor:
    """With one at least of the truth values that each row has of its own, where it lacks it: at
    any of their places, or without a draw at its start."""
    axis = [axis for axis, size in enumerate(own.shape) if size > 1][-1]
    for number in (False, True):
        kept = own == number
        likely = kept * (1 + draw.uniform(*own.shape)) if draw else torch.zeros_like(own).long()
        place = likely.argmax(axis, keepdim=True)
        lacks = kept.any(axis, keepdim=True) & ~(drawn == number).any(axis, keepdim=True)
        drawn = drawn.scatter(axis, place, drawn.gather(axis, place) ^ lacks)
    return drawn


def shuffle(x: Tensor, draw: Draw) -> None:
    """Elements of lines along the last axis exchange their places."""
    lines = x.movedim(-1, 0)
    to = draw.pairs(len(lines))[0] if draw.few else slice(None)
    lines[to] = lines[to].gather(0, draw.uniform(*lines[to].shape).argsort(0))
