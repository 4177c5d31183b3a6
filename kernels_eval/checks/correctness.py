"""What counts as the same answer: pure comparisons against an oracle, and the verdict reason that
follows.

Sources: the gates are VERIFIER's (RMS(err)/RMS(oracle) <= max(1e-5, 8 x the fp32 reference's own
error) for fp32, 2e-3 for fp16 and TF32, 1.6e-2 for bf16; elementwise |err| <= r (|y| + RMS(y)));
KernelBench's allclose tolerances are recorded beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kernels_eval.config import CorrectnessConfig

PRECISION_OF = {"float32": "fp32", "float64": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def measure(actual: Any, oracle: Any, reference: Any) -> dict[str, Any]:
    """Errors of one output tensor. `actual` and `reference` have the task's dtype, `oracle` is
    float64 where it fitted.

    Returns rms (RMS(err)/RMS(oracle)), max (max |err| / (|y| + RMS(y))), reference_rms and
    reference_max (the same of the reference), systematic (the error is a function of the output, as
    that of another formula is), masks_match (NaN and infinities in the same places), finite, and
    KernelBench's two tolerances. All dimensionless.
    """
    record = _measured(actual, oracle, reference)
    if (
        FORMULA_FROM < record["rms"] < FORMULA_TO
        and not record["systematic"]
        and actual.is_floating_point()
    ):
        record["systematic"] = _follows_output(oracle.reshape(-1), actual.reshape(-1))
    return record


FORMULA_FROM, FORMULA_TO = 1e-5, 0.1
"""Relative errors of which it is asked whether they look like rounding or like another formula."""
FORMULA_SAMPLE, FORMULA_BINS, FORMULA_SHARE = 1 << 16, 64, 0.3


def _follows_output(y: Any, a: Any) -> bool:
    """Is the error of up to 65,536 spread elements a function of the output, beyond a constant
    share of it?

    An approximation (GELU by tanh, say) errs alike wherever the output is alike; rounding, of
    inputs or outputs, scatters. So the elements are sorted by the output and cut into 64 bins of
    equal size: the means of the bins explain 55 % or more of that GELU's squared error and under 1
    % of a rounded one's (6 % where digits are cut off). Values that a 16-bit type holds exactly
    were rounded to it, however narrow their range. An approximation whose error sits in the
    farthest outputs alone is not recognised.
    """
    import torch

    step = -(-y.numel() // FORMULA_SAMPLE)
    y, a = y[::step].double(), a[::step].double()
    usable = torch.isfinite(y) & torch.isfinite(a)
    y, a = y[usable], a[usable]
    size = y.numel() // FORMULA_BINS
    if size < 16 or any(
        bool((a.to(narrow).double() == a).all()) for narrow in (torch.float16, torch.bfloat16)
    ):
        return False
    error = a - y
    error = (error - y * (error @ y / (y @ y).clamp(min=1e-300)))[y.argsort()][
        : size * FORMULA_BINS
    ].reshape(FORMULA_BINS, size)
    explained, whole = error.mean(1).square().sum() * size, error.square().sum()
    return bool(explained > FORMULA_SHARE * whole)


def _measured(actual: Any, oracle: Any, reference: Any) -> dict[str, Any]:
    import torch

    if not actual.is_floating_point() and not actual.is_complex():
        equal = bool(torch.equal(actual, reference.to(actual.dtype)))
        return _record(0.0 if equal else 1.0, 0.0, 0.0 if equal else 1.0, True, True, equal, equal)
    y, a, r = oracle.reshape(-1), actual.reshape(-1), reference.reshape(-1)
    oracle_is_reference = y.dtype == r.dtype and y.data_ptr() == r.data_ptr()
    largest = (
        [_largest(tensor) for tensor in ((y, a) if oracle_is_reference else (y, a, r))]
        if not actual.is_complex()
        else [math.inf]
    )
    if all(map(math.isfinite, largest)):
        squares_fit = SQUARED_FROM < max(largest) < SQUARED_TO
        if (
            oracle_is_reference
            and squares_fit
            and y.numel()
            and actual.dtype == y.dtype == torch.float32
        ):
            return _measure_narrow(y, a)
        return _measure_finite(y, a, r)
    scale = max(_root_mean_square(y, a, r), 1e-30)
    total = _Sums()
    for part in _parts(y, a, r):
        total.add(*part, scale)
    return total.record(scale)


SQUARED_FROM, SQUARED_TO = 1e-10, 1e15
"""Largest magnitudes whose squares, and those of errors that matter beside them, fit into fp32."""
CHUNK = 1 << 24
DEVICE_CHUNK = 1 << 24
"""Elements compared at once: float64 copies of whole outputs of several gigabytes would not fit
beside them."""


def all_finite(tensor: Any) -> bool:
    """No NaN and no infinity, in one pass without a temporary: both propagate into the smallest and
    the largest value."""
    import torch

    return not tensor.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def _largest(tensor: Any) -> float:
    """The largest magnitude, in one pass without a temporary; NaN or infinite where an element
    is."""
    import torch

    if not tensor.numel():
        return 0.0
    least, most = torch.stack(torch.aminmax(tensor)).tolist()
    return most - least if not math.isfinite(least + most) else max(-least, most)


def _measure_narrow(y: Any, a: Any) -> dict[str, Any]:
    """`measure` where the fp32 reference is its own oracle, as it is for outputs of gigabytes: in
    fp32, with a quarter of the traffic.

    Sums over a chunk are exact to about 1e-6, far below what any gate asks for; the chunks are
    added in float64.
    """
    import torch

    wide = {"dtype": torch.float64, "device": y.device}
    step = DEVICE_CHUNK if y.is_cuda else CHUNK
    spans = [slice(start, start + step) for start in range(0, y.numel(), step)]
    energy = sum((torch.dot(y[span], y[span]).double() for span in spans), torch.zeros((), **wide))
    scale = (energy / y.numel()).sqrt().clamp(min=1e-30).float()
    sums, worst, loose = (
        torch.zeros(2, **wide),
        torch.zeros((), device=y.device),
        torch.full((2,), -math.inf, device=y.device),
    )
    for span in spans:
        error, size = a[span] - y[span], y[span].abs()
        sums += torch.stack([torch.dot(error, error), torch.dot(error, y[span])]).double()
        apart = error.abs_()
        beyond = torch.stack(
            [
                torch.sub(apart, size, alpha=tolerance).amax() - tolerance
                for tolerance in (1e-4, 1e-2)
            ]
        )
        loose, worst = (
            torch.maximum(loose, beyond),
            torch.maximum(worst, apart.div_(size.add_(scale)).amax()),
        )
    (error2, cross), (loose4, loose2) = sums.tolist(), loose.tolist()
    total = _Sums(
        error=error2, energy=float(energy), cross=cross, count=y.numel(), worst=float(worst)
    )
    total.loose4, total.loose2 = loose4 <= 0, loose2 <= 0
    return total.record(float(scale))


def _measure_finite(y: Any, a: Any, r: Any) -> dict[str, Any]:
    """`measure` for flat tensors without NaN and infinities: sums stay on the device, which is
    waited for once."""
    import torch

    wide = {"dtype": torch.float64, "device": y.device}
    step = DEVICE_CHUNK if y.is_cuda else CHUNK
    spans = [slice(start, start + step) for start in range(0, y.numel(), step)]
    energy = sum((y[span].double().square().sum() for span in spans), torch.zeros((), **wide))
    scale = (energy / max(y.numel(), 1)).sqrt().clamp(min=1e-30)
    sums, worst, loose = (
        torch.zeros(3, **wide),
        torch.zeros(2, **wide),
        torch.ones(2, dtype=torch.bool, device=y.device),
    )
    oracle_is_reference = y.dtype == r.dtype and y.data_ptr() == r.data_ptr()
    for span in spans:
        yy, aa = y[span].double(), a[span].double()
        rr = yy if oracle_is_reference else r[span].double()
        error, own, bound = aa - yy, rr - yy, yy.abs() + scale
        sums += torch.stack([error.square().sum(), own.square().sum(), (error * yy).sum()])
        worst = torch.maximum(
            worst, torch.stack([(error.abs() / bound).amax(), (own.abs() / bound).amax()])
        )
        apart, size = (aa - rr).abs(), rr.abs()
        loose &= torch.stack(
            [(apart <= 1e-4 + 1e-4 * size).all(), (apart <= 1e-2 + 1e-2 * size).all()]
        )
    (error2, own2, cross), (most, own_most) = sums.tolist(), worst.tolist()
    total = _Sums(
        error=error2,
        own=own2,
        energy=float(energy),
        cross=cross,
        count=y.numel(),
        worst=most,
        own_worst=own_most,
    )
    total.loose4, total.loose2 = loose.tolist()
    return total.record(float(scale))


def _parts(*tensors: Any) -> Iterator[tuple[Any, ...]]:
    """The flat tensors in float64 (or complex128), chunk by chunk."""
    import torch

    wide = torch.complex128 if tensors[1].is_complex() else torch.float64
    for start in range(0, max(tensors[0].numel(), 1), CHUNK):
        yield tuple(tensor[start : start + CHUNK].to(wide) for tensor in tensors)


def _usable(y: Any, a: Any, r: Any) -> Any:
    import torch

    return torch.isfinite(y) & torch.isfinite(a) & torch.isfinite(r)


def _root_mean_square(y: Any, a: Any, r: Any) -> float:
    """RMS of the oracle over the elements that are finite in all three."""
    energy, count = 0.0, 0
    for part in _parts(y, a, r):
        values = part[0][_usable(*part)]
        energy += float(values.abs().square().sum())
        count += values.numel()
    return (energy / count) ** 0.5 if count else 0.0


@dataclass
class _Sums:
    """Running sums over chunks, from which `measure` makes its record."""

    error: float = 0.0
    own: float = 0.0
    energy: float = 0.0
    cross: complex = 0.0
    count: int = 0
    worst: float = 0.0
    own_worst: float = 0.0
    masks: bool = True
    finite: bool = True
    loose4: bool = True
    loose2: bool = True

    def add(self, y: Any, a: Any, r: Any, scale: float) -> None:
        import torch

        same = torch.equal(torch.isnan(a), torch.isnan(r)) and torch.equal(
            torch.isfinite(a), torch.isfinite(r)
        )
        self.masks = self.masks and same and bool((a[torch.isinf(r)] == r[torch.isinf(r)]).all())
        self.finite = self.finite and bool(torch.isfinite(r).all())
        self.loose4 = self.loose4 and torch.allclose(a, r, atol=1e-4, rtol=1e-4, equal_nan=True)
        self.loose2 = self.loose2 and torch.allclose(a, r, atol=1e-2, rtol=1e-2, equal_nan=True)
        usable = _usable(y, a, r)
        y, error, own = y[usable], (a - y)[usable], (r - y)[usable]
        if not error.numel():
            return
        self.error += float(error.abs().square().sum())
        self.own += float(own.abs().square().sum())
        self.energy += float(y.abs().square().sum())
        self.cross += complex((error * y.conj()).sum())
        self.count += error.numel()
        self.worst = max(self.worst, float((error.abs() / (y.abs() + scale)).max()))
        self.own_worst = max(self.own_worst, float((own.abs() / (y.abs() + scale)).max()))

    def record(self, scale: float) -> dict[str, Any]:
        rms = [
            (total / self.count) ** 0.5 / scale if self.count else 0.0
            for total in (self.error, self.own)
        ]
        # Is the error a constant share of the output (98 % of its variance)? Then a formula is
        # wrong; rounding scatters.
        explained = (
            abs(self.cross) ** 2 / (self.error * self.energy) if self.error and self.energy else 0.0
        )
        record = _record(
            rms[0], rms[1], self.worst, self.masks, self.finite, self.loose4, self.loose2
        )
        return record | {"systematic": explained > 0.98, "reference_max": self.own_worst}


def _record(
    rms: float, own: float, worst: float, masks: bool, finite: bool, loose4: bool, loose2: bool
) -> dict[str, Any]:
    return {
        "rms": rms,
        "reference_rms": own,
        "max": worst,
        "masks_match": masks,
        "finite": finite,
        "kernelbench_1e4": loose4,
        "kernelbench_1e2": loose2,
        "systematic": False,
        "reference_max": 0.0,
    }


def merge(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Worst of several output tensors (or of several trials)."""
    worst = {
        key: max(m[key] for m in measured)
        for key in ("rms", "reference_rms", "max", "reference_max")
    }
    worst["systematic"] = any(m["systematic"] for m in measured)
    return worst | {
        key: all(m[key] for m in measured)
        for key in ("masks_match", "finite", "kernelbench_1e4", "kernelbench_1e2")
    }


def judge(measured: dict[str, Any], precision: str, config: CorrectnessConfig) -> str:
    """`ok`, or the reason why this output is not the reference's: non_finite, precision_downcast or
    wrong_output."""
    if not measured["masks_match"]:
        return "non_finite"
    gate = {"fp32": config.rms_fp32, "fp16": config.rms_half, "bf16": config.rms_bf16}[precision]
    gate = max(gate, config.rms_reference_factor * measured["reference_rms"])
    # The elementwise gate scales with the RMS gate (1e-4 belongs to 1e-5), and like it never asks
    # for more than the reference gives.
    elementwise = max(
        gate * config.elementwise_fp32 / config.rms_fp32,
        config.rms_reference_factor * measured["reference_max"],
    )
    if measured["rms"] <= gate and measured["max"] <= elementwise:
        return "ok"
    # The signature of a downcast: a small relative error spread over the whole output. A few wrong
    # elements are large against the RMS.
    if (
        precision == "fp32"
        and not measured["systematic"]
        and measured["rms"] <= config.rms_bf16
        and measured["max"] <= 8 * config.rms_bf16
    ):
        if measured["rms"] > 10 * gate:
            return "precision_downcast"
    return "wrong_output"
