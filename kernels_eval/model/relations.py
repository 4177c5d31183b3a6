"""Slices of an argument that are like others of it, or like another argument's."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_eval.config import MOST_SHIFTS, OWN_PART, OWN_SHARE, RUN_SHARE, RUNS
from kernels_eval.model.draw import Draw
from kernels_eval.model.measurement import as_real


def relate(x: Tensor, others: list[Tensor], draw: Draw, fewest: int = 2) -> None:
    """Slices are like others, along every axis but the last that has the fewest that may be; parts
    are like another argument's.
    """
    axes = [axis for axis in range(max(1, x.dim() - 1)) if x.shape[axis] >= fewest]
    if draw.few and axes:
        axes = [draw.axis(x, axes)]
    for axis in axes:
        copy_slices(x.movedim(axis, 0), draw)
    if others:
        other = as_real(draw.random.choice(others))
        copy_from = _copy_few_from if draw.few else _copy_from
        if not (draw.few or x.is_floating_point()) and draw.random.random() < 1 / 2:
            copy_from = _copy_all_from
        copy_from(x, other, draw)


def blended(own: Tensor, other: Tensor, draw: Draw) -> Tensor:
    """Another tensor's slices with some of their own elements, and a little of each number: their
    norm and mean stay. Half of what is whole has none of its own."""
    kept, other = _kept_places(own, draw), other.to(own.dtype)
    if own.is_floating_point():
        other = torch.lerp(other, own, OWN_PART)
    else:
        kept &= draw.uniform(*_each(own)) < 1 / 2
    return torch.where(kept, own, other)


def _kept_places(x: Tensor, draw: Draw) -> Tensor:
    """A few here and there, or of some slices a run along one axis, or all but a run; half of
    the runs are at an end."""
    each = _each(x)
    few = draw.uniform(*x.shape) < _between(*OWN_SHARE, draw.uniform(*each))
    if x.dim() < 2:
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


def _as_long_as(x: Tensor, other: Tensor) -> Tensor:
    for axis, count in enumerate(x.shape):
        if count != other.shape[axis]:
            places = torch.arange(count, device=x.device) % other.shape[axis]
            other = other.index_select(axis, places)
    return other


def _copy_few_from(x: Tensor, other: Tensor, draw: Draw) -> None:
    """A few slices become slices of the other tensor, from the same places or others, perhaps
    shifted along another axis."""
    axis, other = draw.axis(x), _as_long_as(x, other)
    lines, likes = x.movedim(axis, 0), other.movedim(axis, 0)
    to, like = draw.pairs(len(lines))
    drawn = likes[draw.random.choice((to, like))]
    if x.dim() > 1 and draw.random.random() < 1 / 2:
        along = draw.random.randrange(1, x.dim())
        drawn = drawn.roll(draw.random.randrange(drawn.shape[along]), along)
    lines[to] = blended(lines[to], drawn, draw)


def _copy_from(x: Tensor, other: Tensor, draw: Draw) -> None:
    """Parts are another tensor's, shifted by all shares of their length."""
    other = _as_long_as(x, other)
    size = -(-len(x) // MOST_SHIFTS) if x.dim() > 1 else len(x)
    parts = list(zip(x.split(size), other.split(size), strict=True))
    for nth, (part, like) in enumerate(draw.random.sample(parts, len(parts))):
        axis = draw.random.randrange(x.dim() > 1, x.dim())
        by = int((nth + draw.random.random()) / len(parts) * part.shape[axis])
        drawn = blended(part, like.roll(by, axis), draw)
        if draw.random.random() < 1 / 2:  # what leaves at one end does not return at the other
            drawn.narrow(axis, 0, by).copy_(part.narrow(axis, 0, by))
        part.copy_(drawn)


def _copy_all_from(x: Tensor, other: Tensor, draw: Draw) -> None:
    """All is a part of the other tensor, or made of copies of it; few elements are its own, or
    none."""
    shifts = [draw.random.randrange(size) for size in other.shape]
    drawn = _as_long_as(x, other.roll(shifts, tuple(range(other.dim()))))
    x.copy_(blended(x[None], drawn[None], draw)[0])
