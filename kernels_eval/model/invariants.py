"""What every declared draw of an argument has: what redrawn ones keep, and what one of them lacks.

Guarantees: what decides an argument's meaning is kept: an order that an operator requires, the
range of integers, masks of two numbers, probabilities, matrices that operators or the task's text
require. What only saves work is missing in the draw called `varied`: one number, zeros at fixed
places, symmetry, a low rank, distinct indices, floats that are whole, a mask's pattern. In this and
in the one called `moved` no float is exactly as declared: what holds by chance (few numbers, equal
arguments, blocks or draws, factors) holds no more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from random import Random
from typing import Any

import torch
from torch import Tensor

from kernels_eval.config import (
    LARGE_EXPONENT,
    LARGE_INTEGER,
    MOST_SHUFFLED,
    MOVED_SHARE,
    RANK_SAMPLE,
    VARIED_SHARE,
    ZEROS_SHARE,
)
from kernels_eval.model.distributions import drawn_from
from kernels_eval.model.measurement import as_real, computable
from kernels_eval.protocol import MOVED, POSITIVE, InputNote, InputPlan

VARIED_EDGES, VARIED, VARIED_OTHERWISE = "varied_edges", "varied", "varied_otherwise"
"""Not distributions: arguments without what saves work, with integers that declared ones lack; only
the first; and a milder form, for tasks that give no finite answer for these."""
RARE, BLOCKS = "rare", "blocks"
"""Nor these: as declared, but for values that a task may be given and no other draw has; and, for
tasks that iterate, matrices of two blocks that are hardly coupled."""

ORDERED = re.compile(r"\.(sorted_sequence|boundaries|bins|offsets|offs|cum_seq\w*|cu_seqlens\w*)$")
"""Operators' arguments that must be in order."""
DISTINCT = re.compile(r"^(scatter|index_copy|index_put|_index_put_impl|put)\.(index|indices)$")
"""Places to write at: of two values for one, either may remain."""
AS_DECLARED = re.compile(
    r"^_local_scalar_dense|\.(repeats|lengths|batch_sizes|(compressed|plain|row|col)_indices)$"
)
"""Integers that decide the shapes of others, or depend on them."""
WRAPS = re.compile(r"^reads (take\.index|(_unsafe_|_)?(index|index_put|index_put_impl)\.indices)$")
"""Operators that count negative integers from the end."""
BOUNDED = re.compile(r"\.(index|indices|targets?)$|^(one_hot|bincount)\.")
"""Operators that refuse integers out of bounds, a GPU's by ending the process."""
ARITHMETIC = re.compile(
    r"^(reads )?(add|sub|rsub|neg|abs|div|floor_divide|remainder|fmod|gcd|lcm|_to_copy|clone|detach"
    r"|alias|view|_unsafe_view|_reshape_alias|expand|unsqueeze|squeeze|transpose|permute|select"
    r"|slice|t|clamp|clamp_min|clamp_max|cat|stack)\."
)
"""Operators that compute with integers of any size: neither indices nor lengths. (Products and long
sums could overflow.)"""
DIVISIONS = re.compile(r"^(div|floor_divide|remainder|fmod|gcd|lcm)\.")
IGNORED = re.compile(r"(?:ignore_index|padding_idx)\s*=\s*(-?\d+)")
IGNORING = re.compile(r"nll_loss|embedding")
DEFINITE = re.compile(r"cholesky|linalg_eigh")
EXPONENTS = re.compile(r"^(reads )?(pow\.exponent|(_to_copy|clone|detach)\.self)$")
TRIANGULAR = re.compile(r"triangular|^tri[lu]\.")

Keep = Callable[[Tensor, Tensor], Tensor]
"""Gives drawn elements, and the declared ones, an invariant."""
Variation = Callable[[Tensor, torch.Generator, InputNote], Tensor]


# -- invariants ------------------------------------------------------------------------------------


def _is_whole(x: Tensor) -> bool:
    return not x.is_floating_point() or bool((x == x.round()).all())


def _is_one_number(x: Tensor) -> bool:
    return bool((x == x.reshape(-1)[0]).all())


def _are_two_numbers(x: Tensor) -> bool:
    if x.dtype == torch.bool:
        return True
    least, largest = x.aminmax()
    return bool(((x == least) | (x == largest)).all())


def _are_probabilities(x: Tensor) -> bool:
    if x.dim() == 0 or x.shape[-1] <= 1 or not bool((x >= 0).all()):
        return False
    sums = x.sum(-1)
    return bool(((sums - 1).abs() < 1e-3).all())


def _rises(x: Tensor) -> bool:
    if x.dim() == 0 or x.shape[-1] < 3 or bool((x[..., 0] > x[..., -1]).any()):
        return False
    return bool((x[..., 1:] >= x[..., :-1]).all())


def _falls(x: Tensor) -> bool:
    return x.dim() > 0 and _rises(x.flip(-1))


def _is_ordered(x: Tensor) -> bool:
    """Along any dimension."""
    lines = [x.movedim(dim, -1) for dim in range(x.dim())]
    return any(_rises(each) or _falls(each) for each in lines)


def _is_distinct(x: Tensor) -> bool:
    return int(x.unique().numel()) == x.numel()


def _is_square(x: Tensor) -> bool:
    return x.dim() >= 2 and x.shape[-1] == x.shape[-2] > 1


def _is_symmetric(x: Tensor) -> bool:
    corners = _is_square(x) and torch.equal(x[..., 0, -1], x[..., -1, 0])  # of most, enough
    return corners and torch.equal(x, x.mT)


def _is_definite(x: Tensor) -> bool:
    return not bool(torch.linalg.cholesky_ex(x.double()).info.any())


def _is_triangular(x: Tensor) -> bool:
    if not _is_square(x) or bool((x[..., 0, -1] * x[..., -1, 0]).any()):
        return False
    return bool(x.tril(-1).any()) != bool(x.triu(1).any())


def _has_zeros(x: Tensor) -> bool:
    return float((x == 0).float().mean()) > ZEROS_SHARE


def _has_low_rank(x: Tensor) -> bool:
    """Whether rows, columns or blocks repeat, by a sample of few."""
    if x.dim() < 2:
        x = x.reshape(-1)[: x.numel() // RANK_SAMPLE * RANK_SAMPLE].view(-1, RANK_SAMPLE)
    return any(map(_lacks_rank, (x.flatten(0, -2), x.flatten(1))))


def _lacks_rank(rows: Tensor) -> bool:
    size = min(*rows.shape, RANK_SAMPLE)
    if size < RANK_SAMPLE // 4:
        return False
    random = Random(0)
    taken = (random.sample(range(count), size) for count in rows.shape)
    places = [torch.tensor(each, device=rows.device) for each in taken]
    part = rows[places[0]][:, places[1]].double().cpu()
    if not bool(torch.isfinite(part).all()):
        return False
    rank = int(torch.linalg.matrix_rank(part, rtol=1e-4))
    return 8 * rank < 7 * int(size)


def _definite(drawn: Tensor, value: Tensor) -> Tensor:
    if not _is_square(drawn):  # in a smaller shape
        return drawn
    product = drawn @ drawn.mT / drawn.shape[-1]
    product = (product + product.mT) / 2  # a product's halves may be rounded otherwise
    size = product.diagonal(dim1=-2, dim2=-1).mean()
    return product + torch.eye(drawn.shape[-1], device=drawn.device) * size / 10


KEEP: dict[str, Keep] = {
    "definite": _definite,
    "symmetric": lambda drawn, value: (drawn + drawn.mT) / 2 if _is_square(drawn) else drawn,
    "zeros": lambda drawn, value: drawn.masked_fill(value == 0, 0),
    "rising": lambda drawn, value: drawn.sort(-1).values,
    "falling": lambda drawn, value: drawn.sort(-1, descending=True).values,
}


# -- what an argument is ---------------------------------------------------------------------------


def note_of(draws: list[Any], uses: Collection[str] = (), text: str = "") -> InputNote:
    """What may vary about an argument, by declared draws of it, the operators' arguments that it
    flows into (`operator.argument`), and the task's source. Python's integers may count.
    """
    value = draws[0]
    if type(value) is float:
        return InputNote(vary=False, varied="number", timed=value in (0.0, 1.0))
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.numel() == 0:
        return InputNote(vary=False)
    samples = [computable(as_real(x.detach())) for x in draws]
    integers = not value.is_floating_point() and not value.is_complex()
    whole = all(map(_is_whole, samples))
    if all(map(_is_one_number, samples)):
        if integers and value.dtype != torch.bool:
            varied = "" if _stay(uses) else "one_integer"
            return InputNote(vary=False, varied=varied, also=_also(samples, uses, text))
        vary = not whole and not all(map(_are_probabilities, samples))
        return InputNote(vary=vary, varied="constant", timed=True)
    if not whole and all(map(_are_probabilities, samples)):
        return InputNote(vary=False, varied="probabilities", rare="one_hot")
    if whole and all(map(_are_two_numbers, samples)):
        fixed = integers and any(map(AS_DECLARED.search, uses))
        masks = integers or any(bool((x == 0).any()) for x in samples)
        varied, rare = ("", "") if fixed else ("shuffled", "full_rows")
        return InputNote(vary=False, varied=varied, timed=not masks, rare=rare)
    if integers:
        return _note_of_integers(samples, uses, text)
    order = _order(samples) if any(map(ORDERED.search, uses)) else ()
    if whole:
        return InputNote(vary=False, varied="between", keeps=order, timed=not order)
    keeps = (*_matrix(samples, uses), *order)
    triangular = "zeros" in keeps and all(map(_is_triangular, samples))
    meant = (
        bool(order)
        or "definite" in keeps
        or ("symmetric" in keeps and "symmetric" in text.lower())
        or (triangular and ("triangular" in text.lower() or any(map(TRIANGULAR.search, uses))))
    )
    saves_work = keeps or all(map(_is_ordered, samples)) or all(map(_has_low_rank, samples))
    if saves_work and not meant:
        return InputNote(vary=True, keeps=keeps, varied="shuffled", timed=True)
    return InputNote(vary=True, keeps=keeps, varied="moved")


def _note_of_integers(samples: list[Tensor], uses: Collection[str], text: str) -> InputNote:
    """Indices, labels, counts: those that torch does not read are read otherwise."""
    if _stay(uses):
        return InputNote(vary=False)
    order = _order(samples) or _order_of_rows(samples)
    if any(map(ORDERED.search, uses)):  # or what these are computed from
        offsets = samples[0].dim() == 1 and order == ("rising",)
        return InputNote(vary=False, varied="offsets" if offsets else "", keeps=order)
    if any(map(DISTINCT.search, uses)) and all(map(_is_distinct, samples)):
        return InputNote(vary=False, varied="shuffled")
    reads = [use for use in uses if use.startswith("reads ")]
    return InputNote(
        vary=False,
        varied="resampled",
        keeps=order,
        timed=True,
        wraps=samples[0].dtype.is_signed
        and not order
        and bool(reads)
        and all(map(WRAPS.search, reads)),
        also=_also(samples, uses, text),
        rare=_enlarged(samples[0].dtype, uses),
    )


def _enlarged(dtype: torch.dtype, uses: Collection[str]) -> str:
    """The form of integers that flow into divisions, and into arithmetic alone that their type
    holds, or of exponents."""
    if "reads pow.exponent" in uses and all(map(EXPONENTS.search, uses)):
        return "exponents"
    divided = all(map(ARITHMETIC.search, uses)) and any(map(DIVISIONS.search, uses))
    multiplied = any(use.startswith("lcm.") for use in uses)
    fits = dtype is torch.int64 or (dtype is torch.int32 and not multiplied)
    return "large" if divided and fits else ""


def _also(samples: list[Tensor], uses: Collection[str], text: str) -> int | None:
    """A number that integers may be, too: what a loss or an embedding ignores, or none of what is
    counted."""
    ignored = IGNORED.search(text) if any(map(IGNORING.search, uses)) else None
    if ignored:
        return int(ignored[1])
    positive = all(bool((x > 0).all()) for x in samples)
    return 0 if positive and not any(map(BOUNDED.search, uses)) else None


def _stay(uses: Collection[str]) -> bool:
    """Whether integers are left as declared, by the operators that use them."""
    return not uses or any(map(AS_DECLARED.search, uses))


def _order(samples: list[Tensor]) -> tuple[str, ...]:
    found = {"rising": all(map(_rises, samples)), "falling": all(map(_falls, samples))}
    return tuple(name for name, holds in found.items() if holds)


def _order_of_rows(samples: list[Tensor]) -> tuple[str, ...]:
    """Where one of few rows is in order, as the sources of edges are."""
    few = samples[0].dim() == 2 and len(samples[0]) <= 4 and samples[0].shape[1] >= 16
    return ("rising",) if few and all(any(map(_rises, x)) for x in samples) else ()


def _matrix(samples: list[Tensor], uses: Collection[str]) -> tuple[str, ...]:
    found = []
    if all(map(_is_symmetric, samples)):
        required = any(map(DEFINITE.search, uses))
        definite = required and all(map(_is_definite, samples))
        found = ["definite"] if definite else ["symmetric"]
    if all(map(_has_zeros, samples)):
        found.append("zeros")
    return tuple(found)


def decides_shapes(value: object, note: InputNote) -> bool:
    """Whether integers tell where elements of other arguments lie, which are not to be fewer."""
    if not isinstance(value, Tensor):
        return False
    integers = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    stays = note.varied in ("", "offsets")
    return integers and stays and not (value.numel() == 0 or _is_one_number(value))


def uses_matter(value: Tensor) -> bool:
    """Whether a note may depend on the operators that use an argument."""
    x = as_real(value.detach())
    if x.layout != torch.strided or x.numel() < 2 or x.dtype == torch.bool:
        return False
    if not x.is_floating_point():
        return True
    x = computable(x)
    row = x.reshape(-1)[: x.shape[-1]]
    return _rises(row) or _falls(row) or _is_symmetric(x) or _is_triangular(x)


# -- drawing it anew -------------------------------------------------------------------------------


def redrawn(
    value: Any, note: InputNote, seed: int, distribution: str, plan: InputPlan | None = None
) -> Any:
    """An argument from a distribution, or varied, with what it must keep; as declared, if its note
    says so. In the declared strides, which a kernel may rely on.
    """
    if note.varied == "number":  # half to all of it, or of 1 in place of 0
        varies = distribution in VARIATIONS_BY_DRAW
        return (value or 1.0) * Random(seed).uniform(0.5, 1) if varies else value
    forms = FORMS.get(distribution)
    form = note.rare if distribution == RARE else note.varied
    if form not in forms if forms else not note.vary:
        return value
    if value.is_complex():
        parts = redrawn(as_real(value), note, seed, distribution, plan)
        return torch.view_as_complex(parts)
    generator = torch.Generator(device=value.device).manual_seed(seed)
    if forms:
        drawn = forms[form](value, generator, note)
    else:
        drawn = drawn_from(value, generator, distribution, plan)
    if distribution == VARIED_EDGES:
        drawn = _with_other_integers(drawn, generator, note)
    for name in note.keeps if note.varied != "shuffled" or not forms else ():
        definite = name == "symmetric" and distribution.endswith(POSITIVE)
        drawn = KEEP["definite" if definite else name](drawn, value)
    drawn = drawn.to(value.dtype)
    return drawn if value.is_contiguous() else torch.empty_like(value).copy_(drawn)


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
    return shuffled if _is_whole(shuffled) else _moved(shuffled, generator, note)


def _moved(value: Tensor, generator: torch.Generator, note: InputNote) -> Tensor:
    """Each finite element up to a sixteenth smaller, or larger where that is outside of the range
    of all."""
    value = computable(value)
    least, largest = value.where(torch.isfinite(value), 0).aminmax()
    step = value * (MOVED_SHARE * _uniform(value, generator)).to(value.dtype)
    moved = value - step
    moved = torch.where((moved >= least) & (moved <= largest), moved, value + step)
    return torch.where((moved >= least) & (moved <= largest), moved, value)


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
    if _is_distinct(value):
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
    most = LARGE_EXPONENT if note.rare == "exponents" else LARGE_INTEGER
    share, size = _uniform(value, generator), _uniform(value, generator) * most
    chosen = (share < VARIED_SHARE) & (value.abs() < most)
    return torch.where(chosen, value + value.sign() * size.to(value.dtype), value)


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


def _likely_blocks(value: Tensor, generator: torch.Generator, note: InputNote) -> Tensor:
    """The same of probabilities."""
    drawn = _blocks(computable(value), generator, note)
    return drawn / drawn.sum(-1, keepdim=True)


def tied(value: Tensor) -> Tensor:
    """With many equal elements, close to as declared."""
    return (value.detach().float() * 2).floor() / 2


VARIATIONS: dict[str, Variation] = {
    "constant": _other_number,
    "one_integer": _integers_to,
    "probabilities": _probabilities,
    "shuffled": _shuffled,
    "resampled": _resampled,
    "between": _between,
    "offsets": _offsets,
    "moved": _moved,
    "tied": lambda value, generator, note: tied(value),
}
OTHERWISE = VARIATIONS | {
    "constant": _positive_number,
    "one_integer": lambda value, generator, note: value,
    "probabilities": _shuffled_rows,
    "shuffled": _shuffled_rows,
    "between": _resampled,
}
VARIATIONS_BY_DRAW: dict[str, dict[str, Variation]] = {
    VARIED_EDGES: VARIATIONS,
    VARIED: VARIATIONS,
    VARIED_OTHERWISE: OTHERWISE,
}
RARE_FORMS: dict[str, Variation] = {
    "one_hot": _one_hot,
    "full_rows": _full_rows,
    "large": _large,
    "exponents": _large,
}
FORMS = VARIATIONS_BY_DRAW | {
    MOVED: {"moved": _moved, "tied": _moved},
    RARE: RARE_FORMS,
    BLOCKS: {"moved": _blocks, "probabilities": _likely_blocks},
}
"""What redraws an argument, by its note's form, where elements are not drawn from a
distribution."""
