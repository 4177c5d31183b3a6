"""Slices of an argument that are like others of it, or like another argument's."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels_eval.config import (
    FEWEST_ALIKE,
    MOST_SHIFTS,
    OWN_PART,
    OWN_SHARE,
    RUN_SHARE,
    RUNS,
)
from kernels_eval.model.draw import Draw
from kernels_eval.model.measurement import as_real


def relate(x: Tensor, others: list[Tensor], draw: Draw, fewest: int = 2) -> None:
    """Parts are others of it, shifted; slices are like others, along every axis but the last that
    has the fewest that may be; and parts are those of other arguments, shifted.
    """
    if not draw.few:
        _shift_within(x, draw, fewest)
    axes = [axis for axis in range(max(1, x.dim() - 1)) if x.shape[axis] >= fewest]
    if draw.few and axes:
        axes = [draw.axis(x, axes)]
    for axis in axes:
        copy_slices(x.movedim(axis, 0), draw)
    likes = draw.random.sample(others, min(len(others), 1 if draw.few else 2))
    likes = [_as_long_as(x, as_real(like), draw) for like in likes]
    if not likes:
        return
    if draw.few:
        _copy_few_from(x, likes[0], draw)
    elif x.is_floating_point() or draw.random.random() < 1 / 2:
        _shift_from(x, likes, draw, 1 if x.is_floating_point() else 3 / 4)
    else:
        _copy_all_from(x, as_real(draw.random.choice(others)), draw)


def blended(own: Tensor, other: Tensor, draw: Draw, *, runs: bool = True) -> Tensor:
    """Another tensor's slices with some of their own elements, and a little of each number: their
    norm and mean stay. Half of what is whole has none of its own."""
    kept, other = _kept_places(own, draw, runs), other.to(own.dtype)
    if own.is_floating_point():
        other = torch.lerp(other, own, OWN_PART)
    else:
        kept &= draw.uniform(*_each(own)) < 1 / 2
    return torch.where(kept, own, other)


def _kept_places(x: Tensor, draw: Draw, runs: bool) -> Tensor:
    """A few here and there, or of some slices a run along one axis, or all but a run; half of
    the runs are at an end."""
    each = _each(x)
    few = draw.uniform(*x.shape) < _between(*OWN_SHARE, draw.uniform(*each))
    if x.dim() < 2 or not runs:
        return few
    axis = draw.random.randrange(1, x.dim())
    length = _between(*RUN_SHARE, draw.uniform(*each))
    first = (1 - length) * (2 * draw.uniform(*each) - 1 / 2).clamp(0, 1)
    place = torch.arange(x.shape[axis], device=x.device) / x.shape[axis]
    place = place.view([-1 if other == axis else 1 for other in range(x.dim())])
    run = (place >= first) & (place < first + length)
    run ^= draw.uniform(*each) < 1 / 8
    return torch.where(draw.uniform(*each) < RUNS, run, few)


def _each(x: Tensor) -> list[int]:
    return [len(x), *[1] * (x.dim() - 1)]


def _between(least: float, largest: float, share: Tensor) -> Tensor:
    """Small numbers as likely as large ones."""
    return least * (largest / least) ** share


def copy_slices(x: Tensor, draw: Draw) -> None:
    to, like = draw.pairs(len(x))
    x[to] = blended(x[to], x[like], draw)


def exchange_slices(x: Tensor, draw: Draw) -> None:
    to, _ = draw.pairs(len(x))
    x[to] = x[to[draw.order(len(to))]]


def _as_long_as(x: Tensor, other: Tensor, draw: Draw) -> Tensor:
    """Repeated, or one slice of what has more dimensions."""
    while other.dim() > x.dim():
        other = other[draw.random.randrange(len(other))]
    other = other[(None,) * (x.dim() - other.dim())]
    # what becomes shorter comes first: between the axes nothing is larger than `x` and the other
    for axis in sorted(range(x.dim()), key=lambda axis: x.shape[axis] > other.shape[axis]):
        count = x.shape[axis]
        if count != other.shape[axis]:
            places = torch.arange(count, device=x.device) % other.shape[axis]
            other = other.index_select(axis, places)
    return other


def _copy_few_from(x: Tensor, other: Tensor, draw: Draw) -> None:
    """A few slices become slices of the other tensor, from the same places or others, perhaps
    shifted along another axis."""
    axis = draw.axis(x)
    lines, likes = x.movedim(axis, 0), other.movedim(axis, 0)
    to, like = draw.pairs(len(lines))
    drawn = likes[draw.random.choice((to, like))]
    if x.dim() > 1 and draw.random.random() < 1 / 2:
        along = draw.random.randrange(1, x.dim())
        drawn = drawn.roll(draw.random.randrange(drawn.shape[along]), along)
    lines[to] = blended(lines[to], drawn, draw)


def _shift_within(x: Tensor, draw: Draw, fewest: int) -> None:
    """Some slices along each axis become other ones, shifted, and all where there are less than the
    fewest; these may mean other things, if their ranges differ. Of numbers, slices along one axis.
    """
    *axes, longest = sorted(range(x.dim()), key=lambda axis: x.shape[axis])
    chosen, numbers = [longest, *axes[::-1]], x.is_floating_point()
    if numbers:
        chosen = [draw.random.randrange(max(1, x.dim() - 1))]
    for axis in chosen:
        slices, half = x.movedim(axis, 0), x.shape[axis] // 2
        few = 2 * half < fewest
        if half == 0 or (few and not _ranges_alike(slices)):
            continue
        ways = [(slices[half : 2 * half], slices[:half])]
        if axis != longest:
            ways.append((slices[1 : 2 * half : 2], slices[: 2 * half : 2]))
        if axis != longest and not numbers and bool((x > 1).any()):  # no mask
            ways.append((slices[1:], slices[:1].expand_as(slices[1:])))
            ways.append((slices[:-1], slices[-1:].expand_as(slices[1:])))
        to, like = (part.movedim(0, axis) for part in draw.random.choice(ways))
        _shift_from(to, [like], draw, 1 if few else 1 / 2)


def _ranges_alike(slices: Tensor) -> bool:
    least, largest = slices.flatten(1).aminmax(dim=1)
    spread = max(least.max() - least.min(), largest.max() - largest.min())
    return bool(8 * spread <= largest.max() - least.min())


def _shift_from(x: Tensor, likes: list[Tensor], draw: Draw, share: float) -> None:
    """Parts are another tensor's, shifted by all shares of their length: so many of them."""
    # tokens follow each other along the last axis, more often than not
    sizes = [min(size, 2 * MOST_SHIFTS) * (size >= FEWEST_ALIKE) for size in x.shape]
    sizes[-1] *= 4
    if not any(sizes):
        return
    axis = draw.random.choices(range(x.dim()), sizes)[0]
    over = max(range(x.dim()), key=lambda other: (other != axis) * x.shape[other])
    size = -(-x.shape[over] // MOST_SHIFTS) if over != axis else len(x)
    every = range(0, x.shape[over], size)
    places = draw.random.sample(every, math.ceil(share * len(every)))
    moved = x.clone()
    for nth, place in enumerate(places):
        length = min(size, x.shape[over] - place)
        like = draw.random.choice(likes).narrow(over, place, length)
        by = int((nth + draw.random.random()) / len(places) * like.shape[axis])
        # half of what leaves at one end does not return at the other
        kept = by * draw.random.randrange(2)
        part = moved.narrow(over, place, length)
        rest = part.shape[axis] - kept
        part.narrow(axis, kept, rest).copy_(like.roll(by, axis).narrow(axis, kept, rest))
    x.copy_(blended(x, moved, draw, runs=False))


def _copy_all_from(x: Tensor, other: Tensor, draw: Draw) -> None:
    """All is a part of the other tensor, or made of copies of it; few elements are its own, or
    none."""
    shifts = [draw.random.randrange(size) for size in other.shape]
    shifts[:-1] = [draw.random.choice((0, shift)) for shift in shifts[:-1]]
    drawn = _as_long_as(x, other.roll(shifts, tuple(range(other.dim()))), draw)
    x.copy_(blended(x[None], drawn[None], draw)[0])
