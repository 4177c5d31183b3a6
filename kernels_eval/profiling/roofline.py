"""The speed of light of a task on a machine, and how near a kernel comes to it."""

from __future__ import annotations

PEAKS = (
    ("B200", 2.25e15, 8.0e12),
    ("H200", 9.89e14, 4.8e12),
    ("H100", 9.89e14, 3.35e12),
    ("A100", 3.12e14, 2.04e12),
    ("L40S", 3.62e14, 8.64e11),
    ("A10", 1.25e14, 6.0e11),
)
"""Dense bf16 without sparsity (FLOP/s) and memory bandwidth (bytes per second), by a part of the
device's name, from NVIDIA's data sheets; the first that fits."""
PRODUCTS = {"fp32": 6}
"""How many times as long as in bf16 a product takes at least that keeps this precision. fp32: three
products in TF32, which runs at half of bf16's rate (https://arxiv.org/abs/2203.03341)."""


def peak_flops(device_name: str | None, precision: str = "bf16") -> float | None:
    """Peak FLOP/s of a device by its name; None where it is not known."""
    found = _peaks(device_name)
    return found[0] / PRODUCTS.get(precision, 1) if found else None


def peak_bytes_per_s(device_name: str | None) -> float | None:
    """Peak bytes per second of a device's memory by its name; None where it is not known."""
    found = _peaks(device_name)
    return found[1] if found else None


def _peaks(device_name: str | None) -> tuple[float, float] | None:
    of_name = (peaks for part, *peaks in PEAKS if device_name and part in device_name)
    flops, bandwidth = next(of_name, (0.0, 0.0))
    return (flops, bandwidth) if flops else None


def sol_score(kernel_ms: float, reference_ms: float, least_ms: float) -> float | None:
    """How much of the way from the reference to the speed of light a kernel has gone:
    1 / (1 + (T_k - T_SOL) / (T_b - T_SOL)), SOL-ExecBench's score
    (https://arxiv.org/abs/2603.19173).

    0.5 is as fast as the reference (T_b), 1 is the speed of light (T_SOL, milliseconds), and a
    kernel below that scores 1 as well. None where the reference is no slower than the speed of
    light: there is no way to go.
    """
    if reference_ms <= least_ms:
        return None
    return 1 / (1 + max(0.0, kernel_ms - least_ms) / (reference_ms - least_ms))
