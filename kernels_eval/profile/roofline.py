"""The speed of light of a task on a machine, and how near a kernel comes to it."""

from __future__ import annotations

from kernels_eval.tables import table_beside

PEAKS = table_beside(__file__)
PRODUCTS = {"fp32": 6}
"""Least time of a product that keeps this precision, as a multiple of bf16's. fp32: three products
in TF32, at half of bf16's rate (https://arxiv.org/abs/2203.03341).
"""


def peak_flops(device_name: str | None, precision: str = "bf16") -> float | None:
    """None where the device is unknown."""
    flops, _ = _peaks(device_name)
    return flops and flops / PRODUCTS.get(precision, 1)


def peak_bytes_per_s(device_name: str | None) -> float | None:
    """None where the device is unknown."""
    return _peaks(device_name)[1]


def _peaks(device_name: str | None) -> tuple[float | None, float | None]:
    words = set((device_name or "").replace("-", " ").split())
    known = (peaks for part, peaks in PEAKS.items() if words.issuperset(part.split()))
    return next(known, (None, None))


def sol_score(kernel_ms: float, reference_ms: float, least_ms: float) -> float | None:
    """SOL-ExecBench's score: 1 / (1 + (T_k - T_SOL) / (T_b - T_SOL))
    (https://arxiv.org/abs/2603.19173), times in milliseconds.

    0.5 is as fast as the reference (T_b), 1 the speed of light (T_SOL) or faster. None where the
    reference is no slower than the speed of light.
    """
    if reference_ms <= least_ms:
        return None
    return 1 / (1 + max(0.0, kernel_ms - least_ms) / (reference_ms - least_ms))
