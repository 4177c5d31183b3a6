"""Arguments drawn anew, in the forms that their notes name: what they keep, and what one lacks.

Guarantees: what decides an argument's meaning is kept: an order that an operator requires, the
range of integers, masks of two numbers, probabilities, matrices that operators or the task's text
require. What only saves work is missing in the draw called `varied`: one number, zeros at fixed
places, symmetry, a low rank, distinct indices, floats that are whole, a mask's pattern. In this and
in the one called `moved` no float is exactly as declared: what holds by chance (few numbers, equal
arguments, blocks or draws, factors) holds no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from kernels_eval.config import (
    BEYOND_TIMES,
    CHANGING,
    DEFINITE_SHARE,
    ENDS_SHARE,
    LARGE_EXPONENT,
    LARGE_INTEGER,
    MOST_SHUFFLED,
    MOVED_SHARE,
    RUN_OF_ENDS,
    VARIED_SHARE,
    WIDE_INT32,
    WIDE_INTEGER,
)
from kernels_eval.model.distributions import drawn_from
from kernels_eval.model.invariants import is_distinct, is_square, is_whole
from kernels_eval.model.measurement import as_real, computable
from kernels_eval.model.task_text import MATRICES
from kernels_eval.protocol import (
    APART,
    BEYOND,
    BLOCKS,
    ENLARGED,
    GENERAL,
    LASTING_INPUTS,
    LONE,
    MOVED,
    NARROW,
    OUTLIERS,
    PATH,
    POSITIVE,
    RARE,
    UNSORTED,
    UNSTRUCTURED,
    UPPER_BITS,
    VARIED,
    WHOLE_RANGE,
    WIDENED,
    InputNote,
    InputPlan,
    domain_of,
)

VARIED_EDGES, VARIED_OTHERWISE = f"{VARIED}_edges", f"{VARIED}_otherwise"
"""With integers that declared ones lack, too; and a milder form, for tasks that give no finite
answer for these."""

LARGEST_INT32 = 2.0**31 - 1
DISORDERED = (UNSORTED, UNSTRUCTURED)
SETTINGS = {"apart": (1, 2), "one_more": (1,), "two_more": (2,), "one_less": (-1,)}
"""By how much integers of Python differ, each by one of these; they stay in all other draws. Those
that are equal differ `apart`, and what must be odd stays so."""

OTHER_LETTERS = "äéñøßжλ中あ😀"

Keep = Callable[[Tensor, Tensor], Tensor]
"""Gives drawn elements, and the declared ones, an invariant."""
Variation = Callable[[Tensor, torch.Generator, InputNote], Tensor]


def _definite(drawn: Tensor, value: Tensor) -> Tensor:
    if not is_square(drawn):  # in a smaller shape
        return drawn
    product = drawn @ drawn.mT / drawn.shape[-1]
    product = (product + product.mT) / 2  # a product's halves may be rounded otherwise
    size = product.diagonal(dim1=-2, dim2=-1).amax()
    return product + torch.eye(drawn.shape[-1], device=drawn.device) * size / DEFINITE_SHARE


KEEP: dict[str, Keep] = {
    "definite": _definite,
    "symmetric": lambda drawn, value: (drawn + drawn.mT) / 2 if is_square(drawn) else drawn,
    "zeros": lambda drawn, value: drawn.masked_fill(value == 0, 0),
    "rising": lambda drawn, value: drawn.sort(-1).values,
    "falling": lambda drawn, value: drawn.sort(-1, descending=True).values,
}


def redrawn(
    value: Any, note: InputNote, seed: int, distribution: str, plan: InputPlan | None = None
) -> Any:
    """An argument from a distribution, or varied, with what it must keep; as declared, if its note
    says so, or a structure. In the declared strides, which a kernel may rely on.
    """
    if note.structure:
        return value
    if note.free:
        distribution = distribution.removesuffix(domain_of(distribution))
    if note.varied == "number":
        above, varies = distribution == VARIED_EDGES, distribution in VARIATIONS_BY_DRAW
        return _other_float(value, note, Random(seed), above=above) if varies else value
    if note.varied == "text":
        above, varies = distribution == VARIED_EDGES, distribution in VARIATIONS_BY_DRAW
        return other_text(value, Random(seed), above=above) if varies else value
    if note.rare == "setting":
        by = Random(seed).choice(SETTINGS.get(distribution, (0,)))
        return value ^ (by > 0) if type(value) is bool else value + by
    if distribution == GENERAL and not note.general:
        return value
    forms = FORMS.get(distribution)
    rare = distribution in (RARE, PATH, GENERAL, UPPER_BITS, *BEYOND, *WHOLE_RANGE)
    form = note.rare if rare else note.varied
    if distribution == UNSTRUCTURED:
        form = note.matrix * note.promised
    keeps = (*note.keeps, *note.order)
    few = not keeps and not note.vary
    lone = few and distribution.removesuffix(domain_of(distribution)) == LONE
    if lone and note.varied in ONE_ROW:
        generator = torch.Generator(device=value.device).manual_seed(seed)
        return _with_one_row(value, ONE_ROW[note.varied](value, generator, note), seed)
    whole = few and note.varied == "between" and distribution.startswith(OUTLIERS)
    if form not in forms if forms else not (note.vary or whole):
        return value
    if value.is_complex():
        parts = redrawn(as_real(value), note, seed, distribution, plan)
        return torch.view_as_complex(parts)
    generator = torch.Generator(device=value.device).manual_seed(seed)
    if forms:
        drawn = forms[form](value, generator, note)
    else:
        drawn = drawn_from(value, generator, distribution, plan, note.reach)
    if distribution == VARIED_EDGES:
        drawn = _with_other_integers(drawn, generator, note)
    shuffled = bool(forms) and (note.varied == "shuffled" or distribution in DISORDERED)
    for name in () if shuffled else keeps:
        definite = name == "symmetric" and distribution.endswith(POSITIVE)
        drawn = KEEP["definite" if definite else name](drawn, value)
    drawn = drawn.to(value.dtype)
    return drawn if value.is_contiguous() else torch.empty_like(value).copy_(drawn)


def _other_float(value: float, note: InputNote, random: Random, *, above: bool) -> float:
    """A smaller one, or one `above`, by half of the doublings to the last that the task takes, or
    more of them. In place of 0, up to 1."""
    if not value or len(note.reach) < 2:
        return (value or 1.0) * random.uniform(0.5, 1)
    times = note.reach[above] / value
    share: float = math.log(times) * random.uniform(0.5, 1)
    return value * math.exp(share)


def other_text(value: str, random: Random, *, above: bool) -> str:
    """The same letters in another order; `above`: one in eight is of another script, too."""
    letters = random.sample(value, len(value))
    if above:
        places = random.sample(range(len(letters)), -(-len(letters) // 8))
        for place in places:
            letters[place] = random.choice(OTHER_LETTERS)
    return "".join(letters)


def _uniform(value: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(value.shape, generator=generator, device=value.device)


def _other_number(value: Tensor, generator: torch.Generator, note: InputNote) -> Tensor:
    """Of ones, one in eight is 0; of zeros, each is uniform in [0, 1]; of any other number, uniform
    in [0.5, 1.5] times that. One in eight booleans is the other one.
    """
    drawn, number = _uniform(value, generator), float(value.reshape(-1)[0])
    drawn.view(-1)[drawn.argmin()] = 0.0  # one element of few changes, too
    if value.dtype == torch.bool:
        return value ^ (drawn < VARIED_SHARE)
    if number == 1 and value.numel() > 1:
        return drawn >= VARIED_SHARE
    return drawn if number == 0 and value.numel() > 1 else (drawn + 0.5) * (number or 1.0)


def _integers_to(value: Tensor, generator: torch.Generator, note: InputNote) -> Tensor:
    """Others from 1 to this number; of 0 and 1, both."""
    number = int(value.reshape(-1)[0])
    least, largest = (1, number) if number > 1 else (min(0, number), 1)
    device = value.device
    return torch.randint(least, largest + 1, value.shape, generator=generator, device=device)


def _positive_number(value: Tensor, generator: torch.Generator, note: InputNote) -> Tensor:
    if value.dtype == torch.bool:
        return _other_number(value, generator, note)
    return (_uniform(value, generator) + 0.5) * (float(value.reshape(-1)[0]) or 1.0)


def _probabilities(value: Tensor, generator: torch.Generator, note: InputNote) -> Tensor:
    drawn = torch.randn(value.shape, generator=generator, device=value.device)
    return torch.softmax(2 * drawn, -1)


def _shuffled(value: Tensor, generator: torch.Generator, note: InputNote) -> Tensor:
    """The same elements, moved, at other places; of very many, runs of them, which takes less
    memory."""
    size = 1 if value.numel() <= MOST_SHUFFLED else 61
    flat = value.reshape(-1)
    runs = flat[: len(flat) // size * size].view(-1, size)
    order = torch.randperm(len(runs), generator=generator, device=value.device)
    shuffled = torch.cat([runs[order].view(-1), flat[runs.numel() :]]).view(value.shape)
    return shuffled if is_whole(shuffled) else moved_numbers(shuffled, generator, note)


def moved_numbers(value: Tensor, generator: torch.Generator, note: InputNote) -> Tensor:
    """Each finite element up to a sixteenth smaller, or larger where that is outside of the range
    of all."""
    value = computable(value)
    least, largest = value.aminmax()
    if not bool(torch.isfinite(least) & torch.isfinite(largest)):  # NaN or an infinity
        least, largest = value.where(torch.isfinite(value), 0).aminmax()
    step = (_uniform(value, generator).mul_(MOVED_SHARE)).to(value.dtype).mul_(value)
    moved = value - step
    outside = ((moved >= least) & (moved <= largest)).logical_not_()
    if bool(outside.any()):
        own = value[outside]
        larger = own + step[outside]
        within = (larger >= least) & (larger <= largest)
        moved[outside] = torch.where(within, larger, own)
    return moved


def _shuffled_rows(value: Tensor, generator: torch.Generator, note: InputNote) -> Tensor:
    return value.gather(-1, _uniform(value, generator).argsort(-1)) if value.dim() else value


def _resampled(value: Tensor, generator: torch.Generator, note: InputNote) -> Tensor:
    """The least and the largest remain, at the ends."""
    flat = value.reshape(-1)
    order = torch.randint(len(flat), (len(flat),), generator=generator, device=value.device)
    order[0], order[-1] = flat.argmin(), flat.argmax()
    return flat[order].view(value.shape)


def _between(value: Tensor, generator: torch.Generator, note: InputNote) -> Tensor:
    """Half of the elements are others of these whole numbers, half are between them."""
    least, largest = value.float().aminmax()
    drawn = least + (largest - least) * _uniform(value, generator)
    if note.keeps:  # in order, and without equal ones
        return drawn
    kept = _uniform(value, generator) < 0.5
    return torch.where(kept, _resampled(value, generator, note).float(), drawn)


def _offsets(value: Tensor, generator: torch.Generator, note: InputNote) -> Tensor:
    """Others between the first and the last, without equal ones where these have none."""
    first, last = int(value[0]), int(value[-1])
    size, room = len(value) - 2, last - first - 1
    if is_distinct(value):
        inner = torch.randperm(room, generator=generator, device=value.device)[:size]
    else:
        inner = torch.randint(-1, room + 1, (size,), generator=generator, device=value.device)
    return torch.cat([value[:1], (inner + first + 1).to(value.dtype), value[-1:]])


def _with_other_integers(drawn: Tensor, generator: torch.Generator, note: InputNote) -> Tensor:
    """One in eight counted from the end, or another number; of offsets, two are equal."""
    if note.varied == "offsets" and len(drawn) > 3:
        drawn[-2] = drawn[1]
    if not note.wraps and note.also is None:
        return drawn
    share = _uniform(drawn, generator)
    share.view(-1)[share.argmin()] = 0.0
    other = torch.full_like(drawn, note.also) if note.also is not None else ~drawn
    return torch.where(share < VARIED_SHARE, other, drawn)


def _with_one_row(value: Tensor, drawn: Tensor, seed: int) -> Tensor:
    """A row of what was drawn in place of the declared one; of a vector, a sixteenth."""
    changed = value.clone(memory_format=torch.contiguous_format)
    size = value.shape[-1] if value.dim() > 1 else max(1, value.numel() // 16)
    rows = changed.view(-1)[: value.numel() // size * size].view(-1, size)
    others = drawn.to(value.dtype).reshape(-1)[: rows.numel()].view(-1, size)
    if differ := (rows != others).any(1).nonzero().flatten().tolist():
        row = Random(seed).choice(differ)
        rows[row] = others[row]
    return changed if value.is_contiguous() else torch.empty_like(value).copy_(changed)


def _one_hot(value: Tensor, generator: torch.Generator, note: InputNote) -> Tensor:
    """One row is certain: its probabilities are 0, but for a 1. In the others, one in eight is 0,
    never the largest."""
    kept = (_uniform(value, generator) >= VARIED_SHARE) | (value == value.amax(-1, keepdim=True))
    drawn = (value * kept).contiguous()
    drawn = drawn / drawn.sum(-1, keepdim=True)
    random, rows = Random(generator.initial_seed()), drawn.view(-1, value.shape[-1])
    row = rows[random.randrange(len(rows))].zero_()
    row[random.randrange(len(row))] = 1
    return drawn


def _full_rows(value: Tensor, generator: torch.Generator, note: InputNote) -> Tensor:
    """The same elements: one row has the least ones, one the largest, the rest is shuffled. Of one
    row, all are the least."""
    size = next((size for size in reversed(value.shape) if size > 1), 1)
    if value.numel() > MOST_SHUFFLED:
        return value
    rising = value.reshape(-1).sort().values
    if value.numel() < 2 * size:
        return rising[:1].expand(value.shape).contiguous()
    rest = rising[size:-size]
    order = torch.randperm(len(rest), generator=generator, device=value.device)
    rows = torch.cat([rising[:size], rising[-size:], rest[order]]).view(-1, size)
    order = torch.randperm(len(rows), generator=generator, device=value.device)
    return rows[order].view(value.shape)


def _large(value: Tensor, generator: torch.Generator, note: InputNote) -> Tensor:
    """One in eight is larger, of its sign: indices and counts are never negative."""
    most = {"exponents": LARGE_EXPONENT, "wide": WIDE_INTEGER}.get(note.rare, LARGE_INTEGER)
    if note.rare == "wide" and value.dtype == torch.int32:  # one of two factors: sums have room
        most = generator.initial_seed() % 2 * WIDE_INT32
    share, size = _uniform(value, generator), _uniform(value, generator) * most
    chosen = (share < VARIED_SHARE) & (value.abs() < most)
    size = size.to(value.dtype)
    if note.rare == "wide":  # half of these look alike in 16 bits
        size = torch.where(_uniform(value, generator) < 0.5, size & ~0xFFFF, size)
    return torch.where(chosen, value + value.sign() * size, value)


def _anywhere(value: Tensor, generator: torch.Generator, note: InputNote) -> Tensor:
    """One in eight is any place in what they are places in."""
    share, place = (_uniform(value, generator).double() for _ in range(2))
    share.view(-1)[share.argmin()] = 0.0
    drawn = (place * note.below).to(value.dtype).clamp_(max=note.below - 1)
    return torch.where(share < VARIED_SHARE, drawn, value)


def _beyond(
    value: Tensor,
    generator: torch.Generator,
    note: InputNote,
    *,
    times: int = BEYOND_TIMES,
    signed: bool = False,
) -> Tensor:
    """One in eight, or all of one number, up to so many times as large as the largest (or 1), of
    either sign where any is negative or `signed`. What 32 bits hold stays in these, but for
    integers of 64 bits."""
    largest = float(value.abs().amax()) or 1.0
    held = 2.0**62 if value.dtype is torch.int64 else LARGEST_INT32
    most = min(times * largest, max(largest, held))
    share, size, side = (_uniform(value, generator).double() for _ in range(3))
    share.view(-1)[share.argmin()] = 0.0
    drawn = most * size.square()
    if signed or bool((value < 0).any()):
        drawn = torch.where(side < 0.5, -drawn, drawn)
    if note.varied == "constant":
        return drawn
    return torch.where(share < VARIED_SHARE, drawn.round().to(value.dtype), value)


def _whole_range(
    value: Tensor,
    generator: torch.Generator,
    note: InputNote,
    *,
    above: bool = False,
    times: int = 0,
) -> Tensor:
    """One in eight is any that its type holds, of bytes any byte; runs of others, and a slice of
    each axis, are the largest, some the least: sums of these are the largest, too. `above`: none
    below the declared least, if that is not negative; `times`: up to so many times the largest. No
    0, unless there is one: it may divide."""
    bounds = torch.iinfo(torch.uint8 if note.rare == "bytes" else value.dtype)
    least, largest = bounds.min, bounds.max
    own_least, own_largest = map(int, value.aminmax())
    if above or times:
        least = max(least, 0 if own_least >= 0 else least)
    if times:
        most = times * max(abs(own_least), abs(own_largest), 1)
        least, largest = max(least, -most), min(largest, most)
    share, size = (_uniform(value, generator).double() for _ in range(2))
    share.view(-1)[share.argmin()] = 0.0
    drawn = (least + (size * (largest - least + 1)).floor()).clamp(least, largest)
    changed = torch.where(share < VARIED_SHARE, drawn.to(value.dtype), value)
    random, flat = Random(generator.initial_seed()), changed.view(-1)
    for _ in range(max(1, int(ENDS_SHARE * len(flat) / RUN_OF_ENDS))):
        first = random.randrange(len(flat))
        flat[first : first + RUN_OF_ENDS] = random.choice((largest, largest, largest, least))
    for axis in range(value.dim()) if value.dim() > 1 else ():
        changed.select(axis, random.randrange(value.shape[axis])).fill_(largest)
    return changed if bool((value == 0).any()) else torch.where(changed == 0, value, changed)


def _upper_bits(value: Tensor, generator: torch.Generator, note: InputNote) -> Tensor:
    """One in eight is like another integer in its lower 32 bits alone; of 64 bits."""
    if value.dtype is not torch.int64 or not note.wide:
        return value
    share, size = (_uniform(value, generator) for _ in range(2))
    share.view(-1)[share.argmin()] = 0.0
    upper = (1 + (3 * size).long()) << 32
    return torch.where(share < VARIED_SHARE, value + upper * (1 - 2 * (value < 0).long()), value)


def _blocks(value: Tensor, generator: torch.Generator, note: InputNote) -> Tensor:
    """Two blocks near the largest element, the rest near the least, in an order of their own: what
    iterates converges slowly. The blocks are not of one size: else they would be in balance at
    once. Of a square matrix, rows and columns are in one order.
    """
    if value.dim() < 2:
        return value
    (rows, columns), device = value.shape[-2:], value.device
    left = torch.randperm(columns, generator=generator, device=device)
    upper = left
    if rows != columns:
        upper = torch.randperm(rows, generator=generator, device=device)
    alike = (32 * upper < 15 * rows)[:, None] == (2 * left < columns)
    least, largest = computable(value).aminmax()
    return torch.where(alike, largest, least) * 0.75 + value / 4


def _between_both(value: Tensor, generator: torch.Generator, note: InputNote) -> Tensor:
    """Half of the elements lie between the two numbers."""
    least, largest = value.aminmax()
    drawn = least + (largest - least) * _uniform(value, generator)
    return torch.where(_uniform(value, generator) < 0.5, drawn, value)


def _less_than_one(value: Tensor, generator: torch.Generator, note: InputNote) -> Tensor:
    """Half of the rows of probabilities have smaller sums."""
    shares = torch.empty_like(value[..., :1]).uniform_(-1, 1, generator=generator)
    return value * torch.where(shares < 0, 1, shares)


def _path(value: Tensor, generator: torch.Generator, note: InputNote) -> Tensor:
    """Of a square mask: one path through all rows, which takes as many steps as there are."""
    if not is_square(value):
        return value
    order = torch.randperm(value.shape[-1], generator=generator, device=value.device)
    drawn = value.min().expand(value.shape).clone()
    drawn[..., order[:-1], order[1:]] = value.max()
    return drawn


def _likely_blocks(value: Tensor, generator: torch.Generator, note: InputNote) -> Tensor:
    """The same of probabilities."""
    drawn = _blocks(computable(value), generator, note)
    return drawn / drawn.sum(-1, keepdim=True)


def _unsorted(value: Tensor, generator: torch.Generator, note: InputNote) -> Tensor:
    if not note.order:
        return value
    return (_shuffled_rows if value.dim() > 1 else _shuffled)(value, generator, note)


def _permutations(value: Tensor, generator: torch.Generator, note: InputNote) -> Tensor:
    """Along the axis on which places in it lie: what differs, differs for ever."""
    if note.into_itself is None:
        return value
    return _uniform(value, generator).argsort(note.into_itself)


def _near_identity(value: Tensor, generator: torch.Generator, note: InputNote) -> Tensor:
    """Probabilities of square matrices of which each stays what it is, nearly."""
    if note.rare != "one_hot" or not is_square(value):
        return value
    unit = torch.eye(value.shape[-1], dtype=value.dtype, device=value.device)
    return torch.lerp(unit, value, CHANGING)


def tied(value: Tensor) -> Tensor:
    """With many equal elements, close to as declared."""
    return (value.detach().float() * 2).floor() / 2


def faint_as(distribution: str, leaves: list[Any], plan: InputPlan) -> list[Any]:
    """As `FAINT` and `APART` say."""
    kind, *which, by = distribution.split("_")
    found = list(leaves)
    for index in suiting_faint(leaves, plan):
        x = leaves[index]
        if kind == APART and str(index) == which[0]:
            found[index] = x + float(by) * x.double().square().mean().sqrt().to(x.dtype)
        elif kind != APART:
            found[index] = x * 2.0 ** float(by)
    return found


def suiting_faint(leaves: list[Any], plan: InputPlan) -> list[int]:
    """Positions of arguments of float32 that may be any numbers."""
    pairs = enumerate(zip(leaves, plan.notes, strict=False))
    free = [(i, x) for i, (x, note) in pairs if note.vary and not note.structure]
    return [i for i, x in free if x.dtype == torch.float32]


VARIATIONS: dict[str, Variation] = {
    "constant": _other_number,
    "one_integer": _integers_to,
    "probabilities": _probabilities,
    "shuffled": _shuffled,
    "resampled": _resampled,
    "between": _between,
    "offsets": _offsets,
    "moved": moved_numbers,
    "tied": lambda value, generator, note: tied(value),
}
OTHERWISE = VARIATIONS | {
    "constant": _positive_number,
    "one_integer": lambda value, generator, note: value,
    "probabilities": _shuffled_rows,
    "shuffled": _shuffled_rows,
    "between": _resampled,
}
ONE_ROW = {form: OTHERWISE[form] for form in ("constant", "shuffled", "resampled", "between")}
VARIATIONS_BY_DRAW: dict[str, dict[str, Variation]] = {
    VARIED_EDGES: VARIATIONS,
    VARIED: VARIATIONS,
    VARIED_OTHERWISE: OTHERWISE,
}
_signed, _less_beyond = partial(_beyond, signed=True), partial(_beyond, times=BEYOND_TIMES // 4)
_ALWAYS: dict[str, Variation] = {"zeros": _signed, "places": _anywhere}
FORMS: dict[str, dict[str, Variation]] = VARIATIONS_BY_DRAW | {
    BEYOND[0]: _ALWAYS | {"unbounded": _signed, "positive": _beyond, "large": _signed},
    BEYOND[1]: _ALWAYS | dict.fromkeys(("unbounded", "positive", "large"), _beyond),
    BEYOND[2]: _ALWAYS | dict.fromkeys(("unbounded", "positive", "large"), _less_beyond),
    WHOLE_RANGE[0]: dict.fromkeys(NARROW, _whole_range),
    WHOLE_RANGE[1]: dict.fromkeys(NARROW, partial(_whole_range, above=True)),
    WHOLE_RANGE[2]: dict.fromkeys(NARROW, partial(_whole_range, times=BEYOND_TIMES // 4)),
    UPPER_BITS: dict.fromkeys(WIDENED, _upper_bits),
    MOVED: {"moved": moved_numbers, "tied": moved_numbers},
    RARE: {"one_hot": _one_hot, "full_rows": _full_rows, **dict.fromkeys(ENLARGED, _large)},
    BLOCKS: {"moved": _blocks, "probabilities": _likely_blocks},
    PATH: {"full_rows": _path},
    GENERAL: {"full_rows": _between_both, "one_hot": _less_than_one},
    UNSORTED: {"resampled": _unsorted},
    UNSTRUCTURED: dict.fromkeys(MATRICES, _shuffled),
    LASTING_INPUTS: {
        "resampled": _permutations,
        "probabilities": _near_identity,
        "shuffled": _near_identity,
    },
}
"""What redraws an argument, by its note's form, where elements are not drawn from a
distribution."""
