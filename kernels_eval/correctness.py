"""What counts as the same answer: pure comparisons against an oracle, and the verdict reason that follows.

Sources: the gates are VERIFIER's (RMS(err)/RMS(oracle) <= max(1e-5, 8 x the fp32 reference's own error) for fp32, 2e-3 for fp16 and
TF32, 1.6e-2 for bf16; elementwise |err| <= r (|y| + RMS(y))); KernelBench's allclose tolerances are recorded beside them.
"""

from __future__ import annotations

from typing import Any

from kernels_eval.config import CorrectnessConfig

PRECISION_OF = {"float32": "fp32", "float64": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def measure(actual: Any, oracle: Any, reference: Any) -> dict[str, Any]:
    """Errors of one output tensor. `actual` and `reference` have the task's dtype, `oracle` is float64 where it fitted.

    Returns rms (RMS(err)/RMS(oracle)), reference_rms (the same of the reference), max (max |err| / (|y| + RMS(y))), masks_match (NaN and
    infinities in the same places), finite, and KernelBench's two tolerances. All dimensionless.
    """
    import torch

    if not actual.is_floating_point() and not actual.is_complex():
        equal = bool(torch.equal(actual, reference.to(actual.dtype)))
        return _record(0.0 if equal else 1.0, 0.0, 0.0 if equal else 1.0, True, True, equal, equal)
    wide = torch.complex128 if actual.is_complex() else torch.float64
    y, a, r = oracle.to(wide), actual.to(wide), reference.to(wide)
    finite = torch.isfinite(y)
    same_masks = torch.equal(torch.isnan(a), torch.isnan(r)) and torch.equal(torch.isfinite(a), torch.isfinite(r))
    same_masks = same_masks and bool((a[torch.isinf(r)] == r[torch.isinf(r)]).all())
    usable = finite & torch.isfinite(a) & torch.isfinite(r)
    scale = _rms(y[usable])
    floor = max(scale, 1e-30)
    error, own = (a - y)[usable], (r - y)[usable]
    worst = float((error.abs() / (y[usable].abs() + floor)).max()) if error.numel() else 0.0
    measured = _record(
        _rms(error) / floor,
        _rms(own) / floor,
        worst,
        same_masks,
        bool(torch.isfinite(r).all()),
        bool(torch.allclose(a, r, atol=1e-4, rtol=1e-4, equal_nan=True)),
        bool(torch.allclose(a, r, atol=1e-2, rtol=1e-2, equal_nan=True)),
    )
    return measured | {"systematic": _explained_by_scale(error, y[usable])}


def _record(rms: float, own: float, worst: float, masks: bool, finite: bool, loose4: bool, loose2: bool) -> dict[str, Any]:
    return {
        "rms": rms,
        "reference_rms": own,
        "max": worst,
        "masks_match": masks,
        "finite": finite,
        "kernelbench_1e4": loose4,
        "kernelbench_1e2": loose2,
        "systematic": False,
    }


def _explained_by_scale(error: Any, y: Any) -> bool:
    """Is the error a constant share of the output (98 % of its variance)? Then a formula is wrong; rounding scatters."""
    energy = float(error.abs().square().sum())
    if not energy:
        return False
    share = float((error * y.conj()).sum().abs()) ** 2 / (energy * max(float(y.abs().square().sum()), 1e-300))
    return share > 0.98


def _rms(values: Any) -> float:
    return float(values.abs().square().mean().sqrt()) if values.numel() else 0.0


def merge(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Worst of several output tensors (or of several trials)."""
    worst = {key: max(m[key] for m in measured) for key in ("rms", "reference_rms", "max")}
    worst["systematic"] = any(m["systematic"] for m in measured)
    return worst | {key: all(m[key] for m in measured) for key in ("masks_match", "finite", "kernelbench_1e4", "kernelbench_1e2")}


def judge(measured: dict[str, Any], precision: str, config: CorrectnessConfig) -> str:
    """`ok`, or the reason why this output is not the reference's: non_finite, precision_downcast or wrong_output."""
    if not measured["masks_match"]:
        return "non_finite"
    gate = {"fp32": config.rms_fp32, "fp16": config.rms_half, "bf16": config.rms_bf16}[precision]
    gate = max(gate, config.rms_reference_factor * measured["reference_rms"])
    # The elementwise gate scales with the RMS gate: 1e-4 belongs to 1e-5.
    elementwise = gate * config.elementwise_fp32 / config.rms_fp32
    if measured["rms"] <= gate and measured["max"] <= elementwise:
        return "ok"
    # The signature of a downcast: a small relative error spread over the whole output. A few wrong elements are large against the RMS.
    if precision == "fp32" and not measured["systematic"] and measured["rms"] <= config.rms_bf16 and measured["max"] <= 8 * config.rms_bf16:
        if measured["rms"] > 10 * gate:
            return "precision_downcast"
    return "wrong_output"
