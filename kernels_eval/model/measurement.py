"""How far an output is from the expected one, compared chunk by chunk: outputs can be gigabytes.
`kernels_eval.model.correctness` says what the errors mean.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels_eval.config import (
    COMPARED_AT_ONCE,
    ELEMENT_FACTOR,
    FENCE,
    FEWEST_IN_ORDER,
    FEWEST_IN_SLICE,
    FEWEST_OFFSET,
    FORMULA_BINS,
    FORMULA_MAX,
    FORMULA_NEIGHBOURS,
    FORMULA_RMS,
    FORMULA_SAMPLE,
    FORMULA_SHARE,
    FORMULA_TO,
    GATES,
    KERNELBENCH_TOLERANCES,
    MARK_SIZE,
    MARKS_ALIKE,
    MOST_SLICED,
    NEIGHBOUR_SHARE,
    ORDER_UNITS,
    REFERENCE_FACTOR,
    SOUND_SLICE,
    SPREAD_ELEMENTS,
    UNUSED,
    WIDEST,
)
from kernels_eval.model.correctness import PRECISION_OF
from kernels_eval.model.values import as_tensor, attributes_of, is_array, is_object
from kernels_eval.protocol import Comparison

SHORT_MANTISSA = (1 << 13) - 1
"""The float32 bits that TF32, fp16 and bf16 lack."""
WRONG_SHARES = ("wrong_share", "reference_wrong_share")
HUGE, SMALLER = 2.0**490, 2.0**-300
"""Squares of larger values overflow float64 sums: scale by a power of two, exactly."""


def measure(
    actual: Tensor, oracle: Tensor, reference: Tensor, moved: Sequence[Tensor] = ()
) -> Comparison:
    """Errors of one output tensor; `actual` and `reference` in the task's dtype, `oracle` in
    float64 where it fitted. `moved`: the reference where its operators round otherwise.
    """
    if not actual.is_floating_point() and not actual.is_complex():
        unequal = int((actual != reference.to(actual.dtype)).sum())
        error, equal = float(unequal > 0), not unequal
        both = {"kernelbench_1e4": equal, "kernelbench_1e2": equal}
        return Comparison(rms=error, reference_rms=0.0, max=error, unequal=unequal, **both)
    y, a, r = (computable(x.reshape(-1)) for x in (oracle, actual, reference))
    own_oracle = y.dtype == r.dtype and y.data_ptr() == r.data_ptr()
    wide = a.dtype in (torch.float64, torch.complex128)
    while wide and bool(((y.abs() > HUGE) & torch.isfinite(y)).any()):
        y, a, r = (x * SMALLER for x in (y, a, r))
    finite = all(map(_all_finite, (y, a) if own_oracle else (y, a, r)))
    found = _errors_of(y, a, y if own_oracle else r, finite=finite)
    found = found.model_copy(update={"precision": precision_of(actual.dtype)})
    parts, shape = (y, a, r), [*actual.shape]
    if actual.is_complex():  # a part beside a far larger one counts by its own size
        one, other, third = (as_real(x).reshape(-1) for x in parts)
        parts, shape = (one, other, third), [*shape, 2]
        if not own_oracle:
            each = _errors_of(*parts, finite=finite)
            found = found.model_copy(update={name: getattr(each, name) for name in WRONG_SHARES})
    elif not own_oracle and REFERENCE_FACTOR * found.reference_rms > WIDEST.fp32 and finite:
        found = found.model_copy(update=_sound_slice(*parts, shape, found, moved))
    if found.wrong_share:
        found = found.model_copy(update=_wrong_slices(*parts, shape, finite=finite))
    seen = found.rms > FORMULA_RMS or found.max > FORMULA_MAX
    if not seen or found.rms >= FORMULA_TO or a.dtype != torch.float32:
        return found
    if found.systematic or _follows_output(y, a):
        follows = {"systematic": True, "left_rms": _left_open(y, a), "offset": _is_offset(y, a)}
        return found.model_copy(update=follows)
    return found


def precision_of(dtype: torch.dtype) -> str:
    """By which gates an output is judged; what is not named, by fp32's."""
    return PRECISION_OF.get(str(dtype).removeprefix("torch."), "fp32")


def least_step(x: Tensor) -> float:
    """Least distance beyond rounding, as a share of |y| + RMS(y): an element's gate."""
    continuous = x.is_floating_point() or x.is_complex()
    gate = ELEMENT_FACTOR * GATES.of(precision_of(x.dtype))
    return max(GATES.elementwise_fp32, gate) if continuous else 0.0


def unlike(a: Tensor, y: Tensor) -> Tensor:
    if not a.is_floating_point() and not a.is_complex():
        return a != y
    step, alike = least_step(a), (a == y) | ((a != a) & (y != y))
    wide = torch.promote_types(computable(a).dtype, torch.float32)
    a, y = a.to(wide), y.to(wide)
    scale = _unmarked_rms(y.reshape(-1), finite=False)
    near = (a - y).abs() <= step * y.abs() + step * scale  # without overflow
    return ~(near & torch.isfinite(y) | alike)


def as_real(x: Tensor) -> Tensor:
    """Complex numbers as their two parts, in a last dimension."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def computable(x: Tensor) -> Tensor:
    """FP8 as float32, as torch computes nothing in it."""
    return x.float() if x.is_floating_point() and x.element_size() == 1 else x


def _follows_output(y: Tensor, a: Tensor) -> bool:
    """Whether the error is a function of the output: an approximation, not rounding.

    Means of bins of like outputs explain over 60 % of an approximation's squared error (GELU by
    tanh), under 10 % of rounding's (38 % where digits are cut off). A shorter mantissa means
    rounding.
    """
    y, a = _sampled(y, a)
    bins = min(FORMULA_BINS, y.numel() // 16)
    if bins < 4 or not bool((a.view(torch.int32) & SHORT_MANTISSA).any()):
        return False
    error = a - y
    error = error - y * (error @ y / (y @ y).clamp(min=1e-300))
    order = y.argsort()
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=y.device) * bins // len(order)
    mantissa, exponent = torch.frexp(y)
    ratios = (exponent * 64 + (mantissa * 32).floor()).long()
    ratios -= ratios.amin()
    return any(_explained(error, bins) > FORMULA_SHARE for bins in (ranks, ratios))


def _is_offset(y: Tensor, a: Tensor) -> bool:
    """Whether the error is the same number everywhere, but for a tenth of it."""
    y, a = _sampled(y, a)
    error = a - y
    if len(error) < FEWEST_OFFSET:
        return False
    mean = error.mean()
    return bool((error - mean).abs().amax() <= mean.abs() / 10)


def _left_open(y: Tensor, a: Tensor) -> float:
    """RMS of the part of an error that its output does not explain, relative to the output's: what
    sets it apart from the most alike error of the next outputs, as a formula may have branches.
    """
    y, a = _sampled(y, a)
    error = (a - y)[y.argsort()]
    apart = torch.full_like(error, torch.inf)
    for step in range(1, min(FORMULA_NEIGHBOURS, max(0, len(error) - 1)) + 1):
        difference = (error[step:] - error[:-step]).abs()
        apart[step:] = apart[step:].minimum(difference)
        apart[:-step] = apart[:-step].minimum(difference)
    if len(error) < 4 * FORMULA_NEIGHBOURS:  # too few to tell
        left = float(error.abs().amax()) if len(error) else 0.0
    else:  # not the RMS: the farthest outputs have no like
        left = float(apart.kthvalue(len(apart) * 3 // 4).values) / NEIGHBOUR_SHARE
    if not left:
        return 0.0
    scale = float(y.square().mean().sqrt())
    return min(left / scale, sys.float_info.max) if scale else sys.float_info.max


def _sampled(y: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    step = -(-y.numel() // FORMULA_SAMPLE)
    y, a = y[::step].double(), a[::step]
    usable = torch.isfinite(y) & torch.isfinite(a) & (a != y)  # zeros tell nothing
    return y[usable], a[usable]


def _explained(error: Tensor, index: Tensor) -> float:
    counts, squares = index.bincount(), index.bincount(error.square())
    between = index.bincount(error).square() - squares
    return float((between / (counts - 1).clamp(min=1)).sum() / squares.sum().clamp(min=1e-300))


def _spans(count: int) -> list[slice]:
    return [slice(start, start + COMPARED_AT_ONCE) for start in range(0, count, COMPARED_AT_ONCE)]


def _errors_of(y: Tensor, a: Tensor, r: Tensor, *, finite: bool) -> Comparison:
    """`measure` of flat float64 or complex128 tensors; `finite` ones wait once for the device."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    alone = r is y
    sums = torch.zeros(4, dtype=torch.float64, device=y.device)
    energy, worst = sums[0].clone(), sums[:2].clone()
    cross = torch.zeros((), dtype=wide, device=y.device)
    loose = torch.ones(2, dtype=torch.bool, device=y.device)
    masks = True
    count, least, mark = 0, torch.finfo(a.dtype).tiny, least_mark(y)
    for span in _spans(y.numel()):
        part = y[span] if finite else y[span][_usable(y[span], a[span], r[span])]
        part = part if mark == math.inf else part[part.abs() < mark]
        energy += _energy(part.to(wide))
        count += part.numel()
    # a kernel may flush to zero what is below `least`, and squares below 1e-300 have no sum
    floor = min(1e-30, max(least / FORMULA_RMS, 1e-140))
    scale = (energy / max(count, 1)).sqrt().clamp(min=floor)
    for span in _spans(y.numel()):
        yy, aa = y[span].to(wide), a[span].to(wide)
        rr = yy if alone else r[span].to(wide)
        loose &= _near(aa, rr, finite)
        if not finite:
            masks = masks and _same_masks(aa, rr)
            usable = _usable(yy, aa, rr)
            yy, aa, rr = yy[usable], aa[usable], rr[usable]
        if not yy.numel():
            continue
        size = yy.abs()
        marked = size >= mark if mark < math.inf else None
        bound = size + scale
        half = _half(size, float(scale), a.dtype)
        for index, error in enumerate([aa - yy] if alone else [aa - yy, rr - yy]):
            off = error.abs()
            sums[2 + index] += (off > half).sum()
            worst[index] = torch.maximum(worst[index], (off / bound).amax())
            unmarked = error if marked is None else error.masked_fill(marked, 0)
            sums[index] += _energy(unmarked)
            if not index:
                cross += torch.vdot(yy, unmarked)
    (energy_off, own_off, *wrong_counts), (largest, own_largest) = sums.tolist(), worst.tolist()
    most = sys.float_info.max  # JSON has no infinity
    return Comparison(
        rms=min((energy_off / max(count, 1)) ** 0.5 / float(scale), most),
        reference_rms=(own_off / max(count, 1)) ** 0.5 / float(scale),
        max=min(largest, most),
        reference_max=own_largest,
        wrong_share=0.0 if alone else wrong_counts[0] / max(count, 1),
        reference_wrong_share=wrong_counts[1] / max(count, 1),
        masks_match=masks,
        systematic=_proportional(energy_off, float(energy), float(cross.abs())),
        kernelbench_1e4=bool(loose[0]),
        kernelbench_1e2=bool(loose[1]),
    )


def _half(size: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """From which error on an element of this size is wrong."""
    # of what passes through values of about one, such as log(1 + exp(x)), and is no error of a tail
    rounding = 8 * torch.finfo(dtype).eps * min(1.0, scale)
    tiny = size < torch.finfo(dtype).tiny
    return (size / 2).clamp_(min=rounding).masked_fill_(tiny, torch.inf)


def _wrong_slices(
    y: Tensor, a: Tensor, r: Tensor, shape: Sequence[int], *, finite: bool
) -> dict[str, float]:
    """The largest shares of wrong elements at one index of a dimension."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    scale, found = _unmarked_rms(y, finite=finite), {}
    for name, x in {"wrong_slice": a, "reference_wrong_slice": r}.items():
        wrong = torch.empty(y.numel(), dtype=torch.bool, device=y.device)
        for span in _spans(y.numel()):
            yy = y[span].to(wide)
            wrong[span] = (x[span].to(wide) - yy).abs() > _half(yy.abs(), scale, a.dtype)
        found[name] = _worst_slice(wrong.view(shape))
    return found


def _worst_slice(wrong: Tensor) -> float:
    shares = [0.0]
    for dim, size in enumerate(wrong.shape):
        others = [each for each in range(wrong.dim()) if each != dim]
        count = wrong.numel() // size
        if others and count >= FEWEST_IN_SLICE:
            shares.append(float(wrong.sum(others).amax()) / count)
    return max(shares)


def _sound_slice(
    y: Tensor,
    a: Tensor,
    r: Tensor,
    shape: Sequence[int],
    whole: Comparison,
    moved: Sequence[Tensor],
) -> dict[str, object]:
    """The errors of the slice that is farthest beyond the widest gate, of those in which the
    reference errs little, moved or not, where the whole is within a gate that other slices widen.
    """
    within = whole.rms <= REFERENCE_FACTOR * whole.reference_rms
    if a.dtype != torch.float32 or not within or y.numel() > MOST_SLICED:
        return {}
    y = y.double()
    squares = [x.double().reshape(-1).sub(y).square_().view(shape) for x in (a, r, *moved)]
    size = y.square().view(shape)
    floor = float(size.mean().clamp(max=1).sqrt()) * 8 * torch.finfo(a.dtype).eps / WIDEST.fp32
    found = WIDEST.fp32, 0.0
    for dim, count in enumerate(shape):
        others = [each for each in range(len(shape)) if each != dim]
        if not others or y.numel() < FEWEST_IN_SLICE * count:
            continue
        scale = size.mean(others).sqrt().clamp_(min=max(floor, 1e-30))
        off, *owns = (x.mean(others).sqrt() / scale for x in squares)
        own = functools.reduce(torch.maximum, owns)
        off = off.masked_fill(own * SOUND_SLICE > WIDEST.fp32, 0)
        place = int(off.argmax())
        found = max(found, (float(off[place]), float(own[place])))
    beyond: dict[str, object] = {"rms": found[0], "reference_rms": found[1], "of_slice": True}
    return beyond if found[0] > WIDEST.fp32 else {}


def least_mark(y: Tensor) -> float:
    """The size from which on elements are marks, such as -1e9 for masked, beside which other errors
    would seem small; else infinity.

    Marks differ by a thousandth at most, and exceed 1,000 and 1,000 times all others.
    """
    mark, largest = math.inf, _largest_below(math.inf, y)
    while largest > MARK_SIZE:
        others = _largest_below(largest * MARKS_ALIKE, y)
        if not 0 < others * MARK_SIZE < largest:
            break
        mark, largest = largest * MARKS_ALIKE, others
    return mark


def _unmarked_rms(y: Tensor, *, finite: bool) -> float:
    """RMS of a flat tensor's finite unmarked elements, or 0. `finite`: all elements are."""
    energy, count, mark = 0.0, 0, least_mark(y)
    for span in _spans(y.numel()):
        part = y[span].abs()
        part = part if finite and mark == math.inf else part[part < mark]
        energy += float(_energy(part.double()))
        count += part.numel()
    return (energy / count) ** 0.5 if count else 0.0


def _largest_below(limit: float, y: Tensor) -> float:
    largest = 0.0
    for span in _spans(y.numel()):
        if not y.is_complex():  # without a temporary where that is enough
            low, high = map(float, torch.aminmax(y[span]))
            if (within := max(-low, high)) < limit:
                largest = max(largest, within)
                continue
        sizes = y[span].abs()
        largest = max(largest, float(sizes.masked_fill(~(sizes < limit), 0).amax()))
    return largest


def _usable(*tensors: Tensor) -> Tensor:
    return torch.stack([torch.isfinite(tensor) for tensor in tensors]).all(0)


def _energy(x: Tensor) -> Tensor:
    """The sum of squares, without a temporary as large as x."""
    return torch.vdot(x, x).real


def _near(a: Tensor, r: Tensor, finite: bool) -> Tensor:
    if not finite:
        near = [
            torch.isclose(a, r, atol=x, rtol=x, equal_nan=True).all()
            for x in KERNELBENCH_TOLERANCES
        ]
        return torch.stack(near)
    largest = ((a - r).abs_() / (r.abs() + 1)).amax() if a.numel() else a.new_zeros(())
    return torch.stack([largest <= limit for limit in KERNELBENCH_TOLERANCES])


def _same_masks(a: Tensor, r: Tensor) -> bool:
    infinities = [x[torch.isinf(r)] for x in (a, r)]
    if r.is_complex():  # an infinity beside a NaN is not even equal to itself
        infinities = list(map(torch.view_as_real, infinities))
    return (
        torch.equal(torch.isnan(a), torch.isnan(r))
        and torch.equal(torch.isfinite(a), torch.isfinite(r))
        and same(*infinities)
    )


def _proportional(squares: float, energy: float, cross: float) -> bool:
    """Whether the error is a constant share of the output (98 % of its variance): a wrong
    formula.
    """
    # roots first: the product of two tiny sums is 0, and the square of a large one overflows
    return bool(squares and energy) and cross / squares**0.5 / energy**0.5 > 0.98**0.5


def _all_finite(tensor: Tensor) -> bool:
    """No NaN or infinity: one pass without a temporary. Not for complex tensors."""
    if tensor.is_complex():
        return False
    return not tensor.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def unwritten(x: Tensor) -> int:
    """How many floating elements hold what free memory was filled with before a call."""
    if not (x.is_floating_point() or x.is_complex()):
        return 0
    flat, found = as_real(x).reshape(-1), 0
    for span in _spans(len(flat)):
        held = flat[span].view(torch.uint8).view(-1, flat.element_size())
        found += sum(int((held == byte).all(1).sum()) for byte in (FENCE, UNUSED))
    return found


def few_of(x: Tensor) -> Tensor:
    """Some elements, spread, of a tensor that may be large."""
    return x.reshape(-1)[:: x.numel() // SPREAD_ELEMENTS | 1].clone()


def same(a: object, b: object) -> bool:
    """Whether values are bit for bit the same, nested ones too; NaN equals NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        a, b = computable(a), computable(b)
        # outputs can be gigabytes: the usual case first
        if a.device == b.device and torch.equal(a, b):
            return True
        return bool(((a == b) | ((a != a) & (b != b))).all())
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(map(same, a.values(), b.values()))
    if is_array(a):
        return same(as_tensor(a), as_tensor(b))
    if is_object(a):
        return _same_attributes(a, b)
    return not isinstance(a, int | float | str | bool) or a == b


def _same_attributes(a: object, b: object) -> bool:
    """Of two objects; those with an underscore that `a` lacks are no part of it."""
    own, others = attributes_of(a), attributes_of(b)
    if own != [name for name in others if name in own or not name.startswith("_")]:
        return False
    return all(same(getattr(a, name), getattr(b, name)) for name in own)


def same_all(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(same, one, other))


def all_close(one: list[Tensor], other: list[Tensor], rtol: float) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(close(a, b, rtol) for a, b in pairs)


def row_differences(actual: Tensor, own: Tensor) -> Tensor:
    """Largest difference per row of outputs, relative to its largest finite value; infinite for
    unmatched NaN or infinity.
    """
    if not own.is_floating_point() and not own.is_complex():
        return (actual != own).any(1).float()
    if own.element_size() < 4:
        actual, own = actual.float(), own.float()
    errors, sizes = (actual - own).abs(), own.abs()
    if not _all_finite(own):  # what is right must not look as wrong as all else
        same = (actual == own) | ((actual != actual) & (own != own))
        errors, sizes = errors.masked_fill(same, 0), sizes.nan_to_num(0, 0, 0)
    difference, scale = (x.amax(1).float() for x in (errors, sizes))
    return (difference / scale.clamp(min=1e-30)).nan_to_num(math.inf, math.inf)


def misplaced(actual: Tensor, expected: Tensor) -> int:
    """How many neighbours are not in order, by more than rounding, along dimensions in which all
    expected ones are.
    """
    if not expected.is_floating_point() or not expected.dim() or not expected.numel():
        return 0
    few = slice(max(2, COMPARED_AT_ONCE * len(expected) // expected.numel()))
    y, a = (computable(x[few]).double() for x in (expected, actual))
    scale = _unmarked_rms(y.reshape(-1), finite=False)
    bound = ORDER_UNITS * torch.finfo(expected.dtype).eps * (y.abs() + scale)
    bound = bound.masked_fill(~(torch.isfinite(y) & torch.isfinite(a)), math.inf)
    found = 0
    for dim in range(y.dim()):
        own = y.diff(dim=dim).nan_to_num()
        rises, falls = bool((own > 0).any()), bool((own < 0).any())
        if rises is not falls and own.numel() >= FEWEST_IN_ORDER:
            back = -a.diff(dim=dim) if rises else a.diff(dim=dim)
            found += int((back > bound.unfold(dim, 2, 1).amax(-1)).sum())
    return found


def close(a: Tensor, b: Tensor, rtol: float) -> bool:
    """Whether |a - b| <= rtol (|b| + RMS(b)) everywhere, with equal NaN and infinities; tiny values
    count.
    """
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    a, b = computable(a.reshape(-1)), computable(b.reshape(-1))
    finite = _all_finite(a) and _all_finite(b)
    if not finite and not all(_same_masks(a[span], b[span]) for span in _spans(a.numel())):
        return False
    scale = _unmarked_rms(b, finite=finite)
    wide = torch.promote_types(a.dtype, torch.float32)
    for span in _spans(b.numel()):
        x, y = a[span].to(wide), b[span].to(wide)
        if not finite:
            usable = torch.isfinite(y)
            x, y = x[usable], y[usable]
        if not bool(((x - y).abs() <= rtol * y.abs() + rtol * scale).all()):  # no overflow
            return False
    return True
