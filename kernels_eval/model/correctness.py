"""What counts as the same answer: the gates on measured errors (`kernels_eval.config`), and the
reason that follows. KernelBench's allclose tolerances are recorded too. Long sums: N. Higham,
Accuracy and Stability of Numerical Algorithms, chapter 4."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kernels_eval.config import (
    APPROXIMATION_RMS,
    DOWNCAST_SPREAD,
    ELEMENT_FACTOR,
    FORMULA_LEFT,
    GATES,
    MOST_WRONG_SHARE,
    REFERENCE_FACTOR,
    REFERENCE_FACTOR_HALF,
    SCATTER_FACTOR,
    SEQUENTIAL_FACTOR,
    TIGHTEST_GATE,
    WIDEST,
    Gates,
)
from kernels_eval.protocol import Comparison
from kernels_eval.records import Reason

PRECISION_OF = {"float32": "fp32", "float64": "fp32", "float16": "fp16", "bfloat16": "bf16"}
PRECISION_OF |= {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
WORST = (
    *("rms", "reference_rms", "max", "reference_max", "sequential_rms", "scatter_rms"),
    *("scatter_max", "left_rms", "wrong_share", "reference_wrong_share"),
    *("lost_bits", "unequal"),
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
    base, fp8 = gates.of(precision), precision in ("e4m3", "e5m2")
    factor = REFERENCE_FACTOR if precision == "fp32" else REFERENCE_FACTOR_HALF
    # FP8's own error is that of one rounding, and so is its gate
    own = base if fp8 else factor * measured.reference_rms
    plain = SEQUENTIAL_FACTOR * measured.sequential_rms
    scatter = 0.0 if fp8 else SCATTER_FACTOR * measured.scatter_rms
    gate = min(max(base, own, plain, scatter), max(loosest, own, TIGHTEST_GATE))
    # like the RMS gate it never asks for more than the reference gives
    elementwise = max(
        ELEMENT_FACTOR * gate,
        min(gates.elementwise_fp32, ELEMENT_FACTOR * loosest) if precision == "fp32" else 0.0,
        factor * measured.reference_max,
        SCATTER_FACTOR * measured.scatter_max,
    )
    if precision == "fp32" and measured.lost_bits and measured.rms <= WIDEST.bf16:
        return Reason.PRECISION_DOWNCAST
    if measured.rms <= gate and measured.max <= elementwise:
        most = max(MOST_WRONG_SHARE, REFERENCE_FACTOR * measured.reference_wrong_share)
        return Reason.OK if measured.wrong_share <= most else Reason.WRONG_OUTPUT
    if precision != "fp32":
        return Reason.WRONG_OUTPUT
    if measured.systematic:
        # other inputs reach where an approximation is worst
        near = measured.kernelbench_1e4 if own_inputs else measured.kernelbench_1e2
        left = measured.left_rms <= max(gate, FORMULA_LEFT * measured.rms)
        close = near and left and measured.rms <= min(APPROXIMATION_RMS, loosest)
        return Reason.APPROXIMATION if close else Reason.WRONG_OUTPUT
    # The signature of a downcast: a small relative error spread over the whole output. A few wrong
    # elements are large against the RMS.
    least = max(gate, 10 * base, 10 * scatter, plain, 10 * own if own > 4 * plain else 0.0)
    most = min(8 * WIDEST.bf16, DOWNCAST_SPREAD * measured.rms)
    if least < measured.rms <= WIDEST.bf16 and measured.max <= most:
        return Reason.PRECISION_DOWNCAST
    return Reason.WRONG_OUTPUT


def hangs_on_scatter(measured: Comparison, precision: str) -> bool:
    """Whether only the scatter of outputs, not measured yet, could make this answer right."""
    if precision not in ("fp32", "fp16", "bf16") or judge(measured, precision) is Reason.OK:
        return False
    most = WIDEST.of(precision) / SCATTER_FACTOR
    widened = {"scatter_rms": most, "scatter_max": ELEMENT_FACTOR * most}
    return judge(measured.model_copy(update=widened), precision) is Reason.OK
