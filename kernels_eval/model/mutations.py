"""Arguments changed at random: in which ways, at which places and by how much, a seed alone tells,
so that no look at the inputs, or at this source, tells what the next ones are not.

Guarantees: one seed gives the same arguments. What an argument means is kept: what its note names,
the range of integers, the sum of a row of probabilities, both numbers of each row of a mask.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Generator, Tensor

from kernels_eval.config import (
    BEYOND,
    COMMON_NUMBER,
    COMMON_SLICE,
    DENSITY,
    FEWEST_ALIKE,
    MOST_DOUBLINGS,
    MOST_FEW,
    MOST_PLACES,
    MOST_SHIFTS,
    MOST_SHUFFLED,
    OWN_PART,
    OWN_SHARE,
    SHARPNESS,
)
from kernels_eval.model.invariants import is_one_number
from kernels_eval.model.measurement import as_real, computable
from kernels_eval.model.redraws import KEEP, OTHERWISE, moved_numbers, redrawn
from kernels_eval.protocol import (
    FEW,
    LESS,
    MOVED,
    MUTATED,
    POSITIVE,
    SUM,
    VARIED,
    InputNote,
    InputPlan,
    domain_of,
)


@dataclass(frozen=True)
class Draw:
    """What is drawn for one argument."""

    random: Random
    generator: Generator
    less: bool
    few: str
    """A seed of the few places at which slices change, the same for all arguments. Empty: slices
    at many places change."""

    def axis(self, x: Tensor, among: Sequence[int] = ()) -> int:
        """An axis whose slices change. Where few do, a long axis is more likely."""
        axes = among or [axis for axis, size in enumerate(x.shape) if size > 1]
        if not self.few:
            return self.random.choice(axes)
        return self.random.choices(axes, [math.log2(x.shape[axis]) for axis in axes])[0]

    def pairs(self, size: int) -> tuple[Tensor, Tensor]:
        """Places along an axis, and for each the place of another."""
        if not self.few:
            return self._pairs(size)
        random = Random(f"{self.few} {size}")
        count = min(random.randint(1, MOST_FEW), max(1, size // MOST_FEW))
        first = random.randrange(size - count + 1)
        run = range(first, first + count)
        pool = random.choice([[*run], random.sample(range(size), count)])
        to = self.random.sample(pool, self.random.randint(1, count))
        others = self.random.choices([*pool, *self.random.sample(range(size), count)], k=len(to))
        both = torch.tensor([to, others], device=self.generator.device)
        return both[0], both[1]

    def touched(self, x: Tensor, axis: int) -> Tensor:
        """A mask of the slices along this axis that may change; all of them, unless few do."""
        if not self.few:
            return torch.ones([1] * x.dim(), dtype=torch.bool, device=x.device)
        chosen = torch.zeros(x.shape[axis], dtype=torch.bool, device=x.device)
        chosen[self.pairs(x.shape[axis])[0]] = True
        return chosen.view([-1 if other == axis else 1 for other in range(x.dim())])

    def _pairs(self, size: int) -> tuple[Tensor, Tensor]:
        """Few or many places along an axis, a run or here and there; and for each the place of
        another, of few different ones or many. `less`: few, each like one that is far from it, so
        that neighbours are as far from each other as they were, and the mean stays."""
        random, unit = self.random, -(-size // MOST_PLACES)
        count = size // unit
        least, largest = min(4, count // 2), count**0.5 if self.less else 3 / 4 * count
        wanted = max(1, int(least * max(1, largest / max(1, least)) ** random.random()))
        first = random.randrange(count - wanted + 1)
        run = range(first, first + wanted)
        chosen = random.choice([run, random.sample(range(count), wanted)])
        pool = random.sample(range(count), min(count, random.choice((1, 4, count))))
        others = [random.choice(pool) for _ in chosen]
        if self.less:
            far = count // 4, max(count // 4, count - 1 - count // 4)
            others = [(place + random.randint(*far)) % count for place in chosen]
        device = self.generator.device
        begins = torch.tensor([[*chosen], others], device=device) * unit
        to, like = (begins[..., None] + torch.arange(unit, device=device)).flatten(1)
        return to, like

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.generator.device)

    def order(self, size: int) -> Tensor:
        return torch.randperm(size, generator=self.generator, device=self.generator.device)


Change = Callable[[Tensor, Draw], None]
"""Changes slices of a tensor along its first axis."""


def mutated(
    arguments: list[Any],
    plan: InputPlan,
    seed: int,
    *,
    domain: str = "",
    less: bool = False,
    few: bool = False,
) -> list[Any]:
    """These arguments, each like itself at other places and like an earlier one of its type, and
    then changed in some ways, within a domain (`less`: no numbers, whose size and mean look as they
    did, and half of the others). `few`: only slices at one to eight places change; arguments of
    one length have the same places.
    """
    found: list[Any] = []
    for index, (value, note) in enumerate(zip(arguments, plan.notes, strict=True)):
        random = Random(seed + index)
        changes = not less or (not note.vary and random.random() < 1 / 2)
        if note.varied == "number":
            value = redrawn(value, note, seed + index, VARIED)
        elif isinstance(value, Tensor) and value.layout == torch.strided and value.numel():
            generator = Generator(value.device).manual_seed(seed + index)
            draw = Draw(random, generator, less, str(seed) if few else "")
            own = as_real(value.detach())
            wide = torch.float64 if own.dtype == torch.float64 else torch.float32
            wide = wide if own.is_floating_point() else torch.int64
            drawn = own.to(wide, copy=True, memory_format=torch.contiguous_format)
            if note.relates and plan.singular and own.numel() > 1:
                _relate(drawn, [x for x in found if _differ(x, own) < 2], draw)
            if changes:
                drawn = _changed(drawn, note, draw, singular=plan.singular)
            drawn = _kept(drawn, own, note, domain)
            drawn = torch.view_as_complex(drawn.contiguous()) if value.is_complex() else drawn
            value = torch.empty_like(value).copy_(drawn)
        found.append(value)
    return found


def mutated_as(distribution: str, arguments: list[Any], plan: InputPlan) -> list[Any]:
    """As a trial's name says: `mutated_SEED`, perhaps several, each perhaps `_less` or `_few`, and
    a domain; `mutated_movedNUMBER_SEED`: with each number a little smaller."""
    domain = domain_of(distribution)
    for seed, form in re.findall(rf"_(\d+)({LESS}|{FEW})?", distribution):
        arguments = mutated(
            arguments, plan, int(seed), domain=domain, less=form == LESS, few=form == FEW
        )
    if moved := re.match(rf"{MUTATED}_{MOVED}(\d+)", distribution):
        first = len(arguments) * int(moved[1])
        pairs = enumerate(zip(arguments, plan.notes, strict=True), first)
        return [_moved(value, note, seed, domain) for seed, (value, note) in pairs]
    return arguments


def _moved(value: Any, note: InputNote, seed: int, domain: str) -> Any:
    if not note.vary or not isinstance(value, Tensor) or value.layout != torch.strided:
        return value
    own = computable(as_real(value.detach()))
    if not own.numel():
        return value
    generator = Generator(own.device).manual_seed(seed)
    drawn = _kept(moved_numbers(own, generator, note), own, note, domain)
    drawn = torch.view_as_complex(drawn.contiguous()) if value.is_complex() else drawn
    return torch.empty_like(value).copy_(drawn)


def _differ(one: Any, other: Tensor) -> int:
    """How many sizes of tensors of one type differ."""
    if not isinstance(one, Tensor) or one.dtype != other.dtype or one.dim() != other.dim():
        return 2
    return sum(a != b for a, b in zip(one.shape, other.shape, strict=True))


def _changed(x: Tensor, note: InputNote, draw: Draw, *, singular: bool) -> Tensor:
    """In the ways of what it is: a mask, one number, integers, numbers."""
    if note.rare == "full_rows":
        return _mask(x, draw)
    if is_one_number(x):
        return _one_number(x, note, draw)
    if not x.is_floating_point() or note.varied == "between":
        _change_integers(x, note, draw)
    elif note.vary or note.varied:
        changes = CHANGES if singular else REGULAR
        for change in draw.random.sample(changes, draw.random.randint(1, len(changes) // 2)):
            change(x.movedim(draw.axis(x), 0), draw)
    return x


def _kept(drawn: Tensor, own: Tensor, note: InputNote, domain: str) -> Tensor:
    """With what it means, and within its domain."""
    if note.vary:
        drawn = drawn.clamp(*_limits(own, domain))
    elif note.varied == "probabilities":
        sums = drawn.clamp_(min=0).sum(-1, keepdim=True)
        drawn = torch.where(sums > 0, drawn / sums, own)
    elif SUM not in note.keeps and not is_one_number(own):
        drawn = drawn.clamp(*own.aminmax())
    for name in note.keeps:
        drawn = KEEP[name](drawn, own) if name in KEEP else drawn
    return drawn


def _limits(own: Tensor, domain: str) -> tuple[float, float]:
    least, largest = map(float, own.where(torch.isfinite(own), 0).aminmax())
    beyond = max(BEYOND, -least, largest)
    return {"": (-beyond, beyond), POSITIVE: (least, beyond)}.get(domain, (least, largest))


# -- relations -------------------------------------------------------------------------------------


def _relate(x: Tensor, others: list[Tensor], draw: Draw) -> None:
    """Slices are like others, along every axis but the last; parts are like another argument's."""
    fewest = 2 if x.is_floating_point() else FEWEST_ALIKE  # rows of few may be of other ranges
    axes = [axis for axis in range(max(1, x.dim() - 1)) if x.shape[axis] >= fewest]
    if draw.few and axes:
        axes = [draw.axis(x, axes)]
    for axis in axes:
        _copy(x.movedim(axis, 0), draw)
    if others:
        other = _as_long_as(x, as_real(draw.random.choice(others)))
        copy_parts = _copy_few_from if draw.few else _copy_from
        copy_parts(x, other, draw)


def _blended(own: Tensor, other: Tensor, draw: Draw) -> Tensor:
    """Another tensor's slices with some of their own elements, and a little of each number: their
    norm and mean stay."""
    least, largest = OWN_SHARE
    share = least * (largest / least) ** draw.uniform(len(own), *[1] * (own.dim() - 1))
    other = other.to(own.dtype)
    if own.is_floating_point():
        other = torch.lerp(other, own, OWN_PART)
    return torch.where(draw.uniform(*own.shape) < share, own, other)


def _copy(x: Tensor, draw: Draw) -> None:
    to, like = draw.pairs(len(x))
    x[to] = _blended(x[to], x[like], draw)


def _as_long_as(x: Tensor, other: Tensor) -> Tensor:
    for axis, count in enumerate(x.shape):
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
    lines[to] = _blended(lines[to], drawn, draw)


def _copy_from(x: Tensor, other: Tensor, draw: Draw) -> None:
    """Parts are another tensor's, shifted by all shares of their length."""
    size = -(-len(x) // MOST_SHIFTS) if x.dim() > 1 else len(x)
    parts = list(zip(x.split(size), other.split(size), strict=True))
    for nth, (part, like) in enumerate(draw.random.sample(parts, len(parts))):
        axis = draw.random.randrange(x.dim() > 1, x.dim())
        by = int((nth + draw.random.random()) / len(parts) * part.shape[axis])
        drawn = _blended(part, like.roll(by, axis), draw)
        if draw.random.random() < 1 / 2:  # what leaves at one end does not return at the other
            drawn.narrow(axis, 0, by).copy_(part.narrow(axis, 0, by))
        part.copy_(drawn)


# -- numbers ---------------------------------------------------------------------------------------


def _scale(x: Tensor, draw: Draw) -> None:
    to, _ = draw.pairs(len(x))
    if draw.few and draw.random.random() < 1 / 4:  # all other slices shrink instead
        kept = x[to]
        x *= 2 ** draw.random.uniform(-MOST_DOUBLINGS, 0)
        x[to] = kept
    else:
        each = draw.uniform(len(to) if draw.few else 1, *[1] * (x.dim() - 1))
        x[to] *= torch.exp2(MOST_DOUBLINGS * (2 * each - 1))


def _add(x: Tensor, draw: Draw) -> None:
    """A common part, one number or one slice, to some slices or to all."""
    to, like = draw.pairs(len(x))
    random, size = draw.random, x.square().mean().sqrt()
    number = random.uniform(-COMMON_NUMBER, COMMON_NUMBER)
    # along few slices alone, as digits of spreads would cancel
    if draw.few or random.random() < 1 / 2:
        x[to] += random.choice(
            [x[like[:1]] * random.uniform(-COMMON_SLICE, COMMON_SLICE), number * size]
        )
    else:
        x += number * random.choice([x[like[:1]].clone(), size])


def _exchange(x: Tensor, draw: Draw) -> None:
    to, _ = draw.pairs(len(x))
    x[to] = x[to[draw.order(len(to))]]


def _clear(x: Tensor, draw: Draw) -> None:
    x[draw.pairs(len(x))[0]] = 0


def _average(x: Tensor, draw: Draw) -> None:
    to, like = draw.pairs(len(x))
    x[to] = _blended(x[to], x[like].mean(0, keepdim=True), draw)


def _sort(x: Tensor, draw: Draw) -> None:
    if draw.few:
        to, _ = draw.pairs(len(x))
        x[to] = x[to].sort(-1).values
    elif x.numel() <= MOST_SHUFFLED:
        x.copy_(x.sort(0).values)


def _sharpen(x: Tensor, draw: Draw) -> None:
    """Make small elements of some slices smaller still, so that a few large ones dominate."""
    to, _ = draw.pairs(len(x))
    largest = x[to].abs().amax().clamp(min=1e-30)
    x[to] *= (x[to].abs() / largest) ** draw.random.uniform(*SHARPNESS)


REGULAR: tuple[Change, ...] = (_scale, _add, _exchange)
"""What makes no matrix singular."""
CHANGES: tuple[Change, ...] = (*REGULAR, _clear, _average, _sort, _copy, _sharpen)

# -- integers, and masks ---------------------------------------------------------------------------


def _change_integers(x: Tensor, note: InputNote, draw: Draw) -> None:
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


FREE: tuple[Change, ...] = (_nudge, _transfer, _exchange)
INTEGERS = {"resampled": (*FREE, _copy), "shuffled": (_exchange,), "offsets": (_nudge,)}
"""Ways to change integers, by the form of their note. Others: those whose order is not kept."""


def _one_number(x: Tensor, note: InputNote, draw: Draw) -> Tensor:
    """With some others: numbers like it, integers from 1 on below it, or of 0 and 1 the other."""
    if x.is_floating_point():
        drawn = OTHERWISE["constant"](x, draw.generator, note)
        return torch.where(draw.touched(x, draw.axis(x)), drawn, x) if x.numel() > 1 else drawn
    number = int(x.reshape(-1)[0])
    if SUM in note.keeps and x.numel() > 1:
        _transfer(x.view(-1), draw, beyond=True)
    elif number in (0, 1):
        return _mask(x, draw) if x.numel() > 1 else 1 - x
    elif number > 1:
        lines = x.view(-1)
        to = draw.pairs(len(lines))[0] if len(lines) > 1 else slice(None)
        less = draw.random.choice((1, draw.random.randrange(1, number)))
        lines[to] -= less if len(lines) == 1 else (draw.uniform(len(lines))[to] * number).long()
    return x


def _mask(x: Tensor, draw: Draw) -> Tensor:
    """Half of it in a low density, half in a high one, and with one at least of each number that a
    row has."""
    least, largest = x.aminmax()
    if least == largest:
        least, largest = torch.zeros_like(least), torch.ones_like(least)
    axes = [axis for axis, size in enumerate(x.shape) if size > 1]
    axis = axes[-1]
    drawn = draw.uniform(*x.shape) < 2 ** draw.random.uniform(*DENSITY)
    parts = drawn.movedim(axes[0], 0)
    dense = draw.order(len(parts))[::2] if len(axes) > 1 else slice(draw.random.choice((0, None)))
    parts[dense] = ~parts[dense]
    for number in (False, True):
        kept = (x == largest) == number
        place = (kept * (1 + draw.uniform(*x.shape))).argmax(axis, keepdim=True)
        has = kept.any(axis, keepdim=True)
        drawn.scatter_(axis, place, torch.where(has, number, drawn.gather(axis, place)))
    drawn = torch.where(draw.touched(x, draw.axis(x)), drawn, x == largest)
    return torch.where(drawn, largest, least)
