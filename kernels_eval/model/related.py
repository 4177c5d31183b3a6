"""Arguments of which rows, and one another, are alike, as those of real tasks are.

Guarantees: every element lies between the least and the largest declared one of its tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from kernels_eval.config import ALIKE_RUNS, FARTHEST, OWN_SHARE, SHIFTS
from kernels_eval.protocol import InputPlan


def with_relations(values: list[Any], plan: InputPlan, seed: int) -> list[Any]:
    """These arguments, each like itself, and like an earlier one of its type that has at most one
    other size. Where a matrix must not be singular, as declared."""
    found: list[Any] = []
    for index, (value, note) in enumerate(zip(values, plan.notes, strict=True)):
        if plan.singular and note.relates and value.dim() and not value.is_complex():
            generator = Generator(value.device).manual_seed(seed + index)
            drawn = _like_itself(value, generator)
            for other in [x for x in found if isinstance(x, Tensor) and _differ(x, value) < 2][:1]:
                drawn = _blended(drawn, _rolled(other, drawn, generator), generator)
            value = torch.empty_like(value).copy_(drawn.clamp(*value.aminmax()))
        found.append(value)
    return found


def _differ(one: Tensor, other: Tensor) -> int:
    """How many sizes of tensors of one type differ."""
    if one.dtype != other.dtype or one.dim() != other.dim():
        return one.dim() + other.dim() + 2
    return sum(a != b for a, b in zip(one.shape, other.shape, strict=True))


def _like_itself(value: Tensor, generator: Generator) -> Tensor:
    """Half of the rows are nearly the first one of a run of them, and in a quarter of all rows half
    of the rows in them are. No element alone, nor a row's sum, tells."""
    like = value[_nearly(len(value), generator)]
    if value.dim() > 2:
        some, places = -(-len(value) // 4), _nearly(value.shape[-2], generator)
        like[:some] = like[:some].index_select(-2, places)
    return _blended(value, like, generator)


def _nearly(count: int, generator: Generator) -> Tensor:
    begins, differs = torch.rand(2, count, generator=generator, device=generator.device)
    places = torch.arange(count, device=generator.device)
    first = (places * (begins < ALIKE_RUNS / count)).cummax(0).values
    return torch.where(differs < 0.5, places, first)


def _rolled(other: Tensor, own: Tensor, generator: Generator) -> Tensor:
    """Another tensor in this one's shape. Parts of it are rolled along one of their dimensions,
    the first ones farthest, and the last quarter remains this one's own."""
    for dim, count in enumerate(own.shape):
        if count != other.shape[dim]:
            places = torch.arange(count, device=own.device) % other.shape[dim]
            other = other.index_select(dim, places)
    parts, moved = [x.chunk(SHIFTS if own.dim() > 1 else 1) for x in (other, own)], []
    for number, (like, kept) in enumerate(zip(*parts, strict=True)):
        step = SHIFTS - number * SHIFTS // len(parts[0]) - SHIFTS // 4
        dim = step % max(1, own.dim() - 1) + (own.dim() > 1)
        by = round(FARTHEST * step / (SHIFTS - SHIFTS // 4) * like.shape[dim])
        moved.append(like.roll(by, dim) if step >= 0 else kept)
    return torch.cat(moved)


def _blended(own: Tensor, other: Tensor, generator: Generator) -> Tensor:
    """Rows of another tensor with 1 to 10 % of their own: so much of each float, or so many of the
    integers."""
    least, largest = OWN_SHARE
    each = len(own), *[1] * (own.dim() - 1)
    share = torch.rand(each, generator=generator, device=own.device)
    share = least * (largest / least) ** share
    if own.is_floating_point():
        return torch.lerp(other.float(), own.float(), share)
    drawn = torch.rand(own.shape, generator=generator, device=own.device)
    return torch.where(drawn < share, own, other)
