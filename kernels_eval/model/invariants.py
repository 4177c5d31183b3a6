"""What every declared draw of an argument has, and what may therefore vary about it."""

from __future__ import annotations

import re
from collections.abc import Collection
from random import Random
from typing import Any

import torch
from torch import Tensor

from kernels_eval.config import (
    FEWEST_ALIKE,
    FULL_BYTE,
    LEAST_TEXT,
    MOST_CODES,
    RANK_SAMPLE,
    ZEROS_SHARE,
)
from kernels_eval.model.measurement import as_real, computable
from kernels_eval.protocol import SUM, InputNote

ORDERED = re.compile(r"\.(sorted_sequence|boundaries|bins|offsets|offs|cum_seq\w*|cu_seqlens\w*)$")
"""Operators' arguments that must be in order."""
NEEDS_ORDER = re.compile(
    rf"{ORDERED.pattern}|^reads (lt|le|gt|ge|roll|cummax|cummin)\.|\.neighbours$"
)
"""These, and operators by which a task may find borders of its own."""
INTO_ITSELF = re.compile(r"\.itself(\d)$")
DISTINCT = re.compile(r"^(scatter|index_copy|index_put|_index_put_impl|put)\.(index|indices)$")
"""Places to write at: of two values for one, either may remain, unless an operator adds them."""
SUMS = re.compile(r"\.(repeats|lengths|batch_sizes)$")
"""Integers that divide a dimension, which their sum is."""
AS_DECLARED = re.compile(
    r"^_local_scalar_dense|\.(repeats|lengths|batch_sizes|(compressed|plain|row|col)_indices)$"
)
"""Integers that decide the shapes of others, or depend on them."""
WRAPS = re.compile(r"^reads (_unsafe_|_)?(index|(index_put|index_put_impl)(_add)?)\.indices$")
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
EXACT = re.compile(
    ARITHMETIC.pattern.removesuffix(r")\.")
    + r"|sort|msort|topk|mm|bmm|mv|dot|mul|sum|cumsum|bitwise_\w+|__[lr]?(and|or|xor|shift)__"
    + r"|(eq|ne|lt|le|gt|ge)(?=\.both))\."
)
"""These, and operators that other code computes in fewer digits, or for declared ranges alone;
comparisons of arguments alone: an index is compared with numbers."""
DIVISIONS = re.compile(r"^(div|floor_divide|remainder|fmod|gcd|lcm)\.")
PLACES = re.compile(
    rf"{BOUNDED.pattern}|{ORDERED.pattern}|\.(itself\d|neighbours|exponent|\w*lengths)$|shift"
    r"|\b(eq|ne|lt|le|gt|ge)\.(self|other)$|\b(isin|histc|bucketize|searchsorted)\."
)
"""Operators whose integers are places, lengths or classes, or are compared with any of these."""
READ_AS_PLACES = re.compile(
    r"^reads .*(\.(index|indices|targets?|exponent|\w*lengths)$|shift\w*\.other$"
    r"|\b(one_hot|bincount|isin|histc|bucketize|searchsorted)\.)"
    r"|\.itself\d$|\b(eq|ne|lt|le|gt|ge)\.(self|other)$|^view\.dtype$"
)
"""Operators that read integers of few bits as places, lengths or classes, compare them so, or take
their bits for those of another type; a mask that such integers give is no place."""
COMPUTED = re.compile(r"^(add|sub|mul|mm|bmm|mv|dot|addmm|baddbmm|addmv|convolution)\.")
COMPARED = re.compile(r"\.(both|number)$|\b(maximum|minimum|clamp\w*|relu)\.")
MASKED = re.compile(r"\b(eq|ne)\.")
UNSIGNED = re.compile(
    r"\b(bitwise_\w+|__[lr]?(and|or|xor)__|(arg|cum|a)?(max|min)\w*|m?sort|argsort|topk"
    r"|\w*unique\w*)\."
)
"""Operators whose kernels may take for granted that integers are not negative."""
BELOW = re.compile(r"^(.*) below (\d+)$")
"""An operator's argument, and the size of what it looks up in these places (0: unknown)."""
IGNORED = re.compile(r"(?:ignore_index|padding_idx)\s*=\s*(-?\d+)")
IGNORING = re.compile(r"nll_loss|embedding")
DEFINITE = re.compile(r"cholesky|linalg_eigh")
EXPONENTS = re.compile(r"^(reads )?(pow\.exponent|(_to_copy|clone|detach)\.self)$")

# -- invariants ------------------------------------------------------------------------------------


def is_whole(x: Tensor) -> bool:
    return not x.is_floating_point() or bool((x == x.round()).all())


def is_one_number(x: Tensor) -> bool:
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


def is_distinct(x: Tensor) -> bool:
    return int(x.unique().numel()) == x.numel()


def is_square(x: Tensor) -> bool:
    return x.dim() >= 2 and x.shape[-1] == x.shape[-2] > 1


def _is_symmetric(x: Tensor) -> bool:
    corners = is_square(x) and torch.equal(x[..., 0, -1], x[..., -1, 0])  # of most, enough
    return corners and torch.equal(x, x.mT)


def _is_definite(x: Tensor) -> bool:
    return not bool(torch.linalg.cholesky_ex(x.double()).info.any())


def is_triangular(x: Tensor) -> bool:
    if not is_square(x) or bool((x[..., 0, -1] * x[..., -1, 0]).any()):
        return False
    return bool(x.tril(-1).any()) != bool(x.triu(1).any())


def _has_zeros(x: Tensor) -> bool:
    return float((x == 0).float().mean()) > ZEROS_SHARE


def has_low_rank(x: Tensor) -> bool:
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


# -- what an argument is ---------------------------------------------------------------------------


def note_of(
    draws: list[Any], uses: Collection[str] = (), code: str = "", size: int = 0
) -> InputNote:
    """What may vary about an argument, by declared draws of it, the operators' arguments that it
    flows into (`operator.argument`), the task's code, and the largest `size` of its arguments.
    Python's integers may count.
    """
    value = draws[0]
    if type(value) is float:
        return InputNote(vary=False, varied="number", timed=value in (0.0, 1.0))
    if type(value) is str and len(value) >= LEAST_TEXT:
        return InputNote(vary=False, varied="text")
    if type(value) in (int, bool):
        return InputNote(vary=False, rare="setting")
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.numel() == 0:
        return InputNote(vary=False)
    samples = [computable(as_real(x.detach())) for x in draws]
    integers = not value.is_floating_point() and not value.is_complex()
    whole = all(map(is_whole, samples))
    if all(map(is_one_number, samples)):
        if integers and value.dtype != torch.bool:
            if _stay(uses):
                return InputNote(vary=False, keeps=_sum(uses))
            return InputNote(vary=False, varied="one_integer", also=_also(samples, uses, code))
        vary = not whole and not all(map(_are_probabilities, samples))
        rare = "" if vary or integers else _of_one_number(samples[0], uses)
        return InputNote(vary=vary, varied="constant", timed=True, rare=rare)
    if not whole and all(map(_are_probabilities, samples)):
        return InputNote(vary=False, varied="probabilities", rare="one_hot", general=True)
    fixed = integers and any(map(AS_DECLARED.search, uses))
    if whole and not fixed and all(map(_are_two_numbers, samples)):
        masks = integers or any(bool((x == 0).any()) for x in samples)
        finite = all(bool(x.isfinite().all()) for x in samples)
        return InputNote(
            vary=False,
            varied="shuffled",
            timed=not masks,
            rare="full_rows",
            general=not integers and finite and any(map(COMPUTED.search, uses)),
        )
    if integers:
        return _note_of_integers(samples, uses, code, size)
    order = _order(samples) if any(map(ORDERED.search, uses)) else ()
    if whole:
        rare = _unbounded(samples, uses, size)
        return InputNote(vary=False, varied="between", keeps=order, timed=not order, rare=rare)
    keeps = (*_matrix(samples, uses), *order)
    saves_work = keeps or all(map(_is_ordered, samples)) or all(map(has_low_rank, samples))
    if not saves_work or order or "definite" in keeps:
        return InputNote(vary=True, keeps=keeps, varied="moved")
    triangular = "zeros" in keeps and all(map(is_triangular, samples))
    matrix = "symmetric" if "symmetric" in keeps else "triangular" * triangular
    return InputNote(vary=True, keeps=keeps, varied="shuffled", timed=True, matrix=matrix)


def _note_of_integers(
    samples: list[Tensor], uses: Collection[str], code: str, size: int
) -> InputNote:
    """Indices, labels, counts: those that torch does not read are read otherwise."""
    order = _order(samples) or _order_of_rows(samples)
    if _stay(uses):
        return InputNote(vary=False, keeps=(*_sum(uses), *order))
    if any(map(ORDERED.search, uses)):  # or what these are computed from
        offsets = samples[0].dim() == 1 and order == ("rising",)
        return InputNote(vary=False, varied="offsets" if offsets else "", keeps=order)
    if any(map(DISTINCT.search, uses)) and all(map(is_distinct, samples)):
        return InputNote(vary=False, varied="shuffled")
    reads = [use for use in uses if use.startswith("reads ")]
    in_rows = samples[0].dim() > 1 and not _order_of_rows(samples)
    needed = any(map(NEEDS_ORDER.search, uses))
    needed |= in_rows and samples[0].shape[-1] < FEWEST_ALIKE  # each place has its own range
    below = _below(samples, uses)
    axes = [int(found[1]) for found in map(INTO_ITSELF.search, sorted(uses)) if found]
    return InputNote(
        vary=False,
        varied="resampled",
        keeps=order if needed else (),
        order=() if needed else order,
        into_itself=next((x for x in axes if _holds_places(samples, x)), None),
        timed=True,
        wraps=samples[0].dtype.is_signed
        and not order
        and bool(reads)
        and all(map(WRAPS.search, reads)),
        also=_also(samples, uses, code),
        rare=_enlarged(samples, uses)
        or _unbounded(samples, uses, size)
        or _narrow(samples, uses)
        or "places" * bool(below),
        below=below,
    )


def _below(samples: list[Tensor], uses: Collection[str]) -> int:
    """The size of what all operators that need places look up in these; 0 where unknown."""
    sizes = {found[1]: int(found[2]) for found in map(BELOW.search, uses) if found}
    needed = [use for use in uses if BOUNDED.search(use) and not use.startswith("reads ")]
    least = min((sizes.get(use, 0) for use in needed), default=0)
    return least if all(int(x.amax()) < least and int(x.amin()) >= 0 for x in samples) else 0


def _holds_places(samples: list[Tensor], axis: int) -> bool:
    """Whether the largest is the last place along this axis."""
    within = axis < samples[0].dim() and all(int(x.amin()) >= 0 for x in samples)
    return within and max(int(x.amax()) for x in samples) == samples[0].shape[axis] - 1


def _enlarged(samples: list[Tensor], uses: Collection[str]) -> str:
    """The form of integers that flow into divisions, and into arithmetic alone that their type
    holds, into products and sorts, but not of bytes, or of exponents.
    """
    dtype = samples[0].dtype
    if "reads pow.exponent" in uses and all(map(EXPONENTS.search, uses)):
        return "exponents"
    divided = all(map(ARITHMETIC.search, uses)) and any(map(DIVISIONS.search, uses))
    multiplied = any(use.startswith("lcm.") for use in uses)
    fits = dtype is torch.int64 or (dtype is torch.int32 and not multiplied)
    if divided and fits:
        return "large"
    exact = bool(uses) and all(map(EXACT.search, uses)) and not all(map(ARITHMETIC.search, uses))
    fits = dtype in (torch.int32, torch.int64)
    return "wide" if exact and fits and not _are_bytes(samples) else ""


def _are_bytes(samples: list[Tensor]) -> bool:
    return all(bool(((x >= 0) & (x < 256)).all()) for x in samples)


def _unbounded(samples: list[Tensor], uses: Collection[str], size: int) -> str:
    """The form of whole numbers that no operator bounds, and that fill no bytes. Compared ones may
    be letters, or places of what has this `size`."""
    narrow = not samples[0].is_floating_point() and samples[0].element_size() < 4
    if narrow or not uses or any(map(PLACES.search, uses)):
        return ""
    largest = max(float(x.abs().amax()) for x in samples)
    compared, bytes_alone = any(map(COMPARED.search, uses)), _are_bytes(samples)
    if (bytes_alone and (compared or largest >= FULL_BYTE)) or (compared and largest <= size):
        return ""
    return "positive" if any(map(UNSIGNED.search, uses)) else "unbounded"


def _narrow(samples: list[Tensor], uses: Collection[str]) -> str:
    """The form of integers of less than 32 bits, or of bytes, that are no places, codes of few
    numbers, or rows of few that mean something each."""
    x = samples[0]
    few_bits = x.element_size() < 4
    if not (few_bits or _are_bytes(samples)) or not uses:
        return ""
    if any(READ_AS_PLACES.search(use) or ORDERED.search(use) for use in uses):
        return ""
    in_rows = x.dim() > 1 and x.shape[-1] < FEWEST_ALIKE
    if in_rows or max(x.unique().numel() for x in samples) <= MOST_CODES:
        return ""
    return "narrow" if few_bits else "bytes"


def _of_one_number(x: Tensor, uses: Collection[str]) -> str:
    """The same of floats that are all one number. Of a mask, others would mean nothing."""
    zeros = not bool(x.any())
    if x.numel() == 1 or (zeros and any(map(MASKED.search, uses))):
        return ""
    return "zeros" if zeros and uses else _unbounded([x], uses, 0)


def _also(samples: list[Tensor], uses: Collection[str], code: str) -> int | None:
    """A number that integers may be, too: what a loss or an embedding ignores, or none of what is
    counted."""
    ignored = IGNORED.search(code) if any(map(IGNORING.search, uses)) else None
    if ignored:
        return int(ignored[1])
    positive = all(bool((x > 0).all()) for x in samples)
    return 0 if positive and not any(map(BOUNDED.search, uses)) else None


def _stay(uses: Collection[str]) -> bool:
    """Whether integers are left as declared, by the operators that use them."""
    return not uses or any(map(AS_DECLARED.search, uses))


def _sum(uses: Collection[str]) -> tuple[str, ...]:
    return (SUM,) if any(map(SUMS.search, uses)) else ()


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
    return integers and stays and not (value.numel() == 0 or is_one_number(value))


def uses_matter(value: Tensor) -> bool:
    """Whether a note may depend on the operators that use an argument."""
    x = as_real(value.detach())
    if x.layout != torch.strided or x.numel() < 2 or x.dtype == torch.bool:
        return False
    x = computable(x)
    if is_whole(x):
        return True
    row = x.reshape(-1)[: x.shape[-1]]
    return _rises(row) or _falls(row) or _is_symmetric(x) or is_triangular(x)
