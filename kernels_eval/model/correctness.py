"""What counts as the same answer: the gates on measured errors (`kernels_eval.config`), and the
reason that follows. KernelBench's allclose tolerances are recorded too. Long sums: N. Higham,
Accuracy and Stability of Numerical Algorithms, chapter 4."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kernels_eval.config import (
    APPROXIMATION_RMS,
    DOWNCAST_SPREAD,
    E4M3_GATE,
    GATES,
    MOST_WRONG_SHARE,
    REFERENCE_FACTOR,
    SEQUENTIAL_FACTOR,
    TIGHTEST_GATE,
    Gates,
)
from kernels_eval.protocol import Comparison
from kernels_eval.records import Reason

PRECISION_OF = {"float32": "fp32", "float64": "fp32", "float16": "fp16", "bfloat16": "bf16"}
PRECISION_OF |= {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
WORST = (
    *("rms", "reference_rms", "max", "reference_max", "sequential_rms"),
    *("wrong_share", "reference_wrong_share", "unequal"),
)


ALL = ("masks_match", "finite", "kernelbench_1e4", "kernelbench_1e2")


def merge(comparisons: Sequence[Comparison]) -> Comparison:
    """The worst of several output tensors, or trials. NaN is worse than any number."""
    found = [vars(comparison) for comparison in comparisons]
    return Comparison(
        systematic=any(each["systematic"] for each in found),
        **{name: max((each[name] for each in found), key=_nan_last) for name in WORST},
        **{name: all(each[name] for each in found) for name in ALL},
    )


def _nan_last(error: float) -> tuple[bool, float]:
    return math.isnan(error), error


def judge(
    measured: Comparison,
    precision: str,
    gates: Gates = GATES,
    *,
    own_inputs: bool = True,
    loosest: float = math.inf,
) -> Reason:
    """OK, or NON_FINITE, PRECISION_DOWNCAST, APPROXIMATION or WRONG_OUTPUT.

    `own_inputs`: KernelBench's tolerance counts, on inputs of the task's own. `loosest`: the gate's
    upper limit (an answer that ignores the inputs), unless the reference's own error is larger.
    """
    if not measured.masks_match:
        return Reason.NON_FINITE
    base = {
        "fp32": gates.fp32,
        "fp16": gates.half,
        "bf16": gates.bf16,
        "e4m3": E4M3_GATE,
        "e5m2": 2 * E4M3_GATE,
    }[precision]
    own = REFERENCE_FACTOR * measured.reference_rms
    if precision in ("e4m3", "e5m2"):  # its own error is that of one rounding, and so is the gate
        own = base
    plain = SEQUENTIAL_FACTOR * measured.sequential_rms
    gate = min(max(base, own, plain), max(loosest, own, TIGHTEST_GATE))
    # The elementwise gate scales with the RMS gate (1e-4 belongs to 1e-5), and like it never asks
    # for more than the reference gives.
    elementwise = max(
        gate * gates.elementwise_fp32 / gates.fp32,
        REFERENCE_FACTOR * measured.reference_max,
    )
    if measured.rms <= gate and measured.max <= elementwise:
        most = max(MOST_WRONG_SHARE, REFERENCE_FACTOR * measured.reference_wrong_share)
        return Reason.OK if measured.wrong_share <= most else Reason.WRONG_OUTPUT
    if precision != "fp32":
        return Reason.WRONG_OUTPUT
    if measured.systematic:
        # other inputs reach where an approximation is worst
        near = measured.kernelbench_1e4 if own_inputs else measured.kernelbench_1e2
        close = near and measured.rms <= APPROXIMATION_RMS
        return Reason.APPROXIMATION if close else Reason.WRONG_OUTPUT
    # The signature of a downcast: a small relative error spread over the whole output. A few wrong
    # elements are large against the RMS.
    least = max(gate, 10 * base, 10 * own if own > 4 * plain else 0.0)
    most = min(8 * gates.bf16, DOWNCAST_SPREAD * measured.rms)
    if least < measured.rms <= gates.bf16 and measured.max <= most:
        return Reason.PRECISION_DOWNCAST
    return Reason.WRONG_OUTPUT
