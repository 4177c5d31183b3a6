"""What counts as the same answer: the gates on measured errors, and the reason that follows.

Sources: the gates are VERIFIER's (RMS(err)/RMS(oracle) <= max(1e-5, 8 x the fp32 reference's own
error) for fp32, 2e-3 for fp16 and TF32, 1.6e-2 for bf16, 0.06 and 0.12 for outputs in FP8 (e4m3,
e5m2), about the rounding to each type; elementwise |err| <= r (|y| + RMS(y)));
KernelBench's allclose tolerances are recorded beside them. Long sums: N. Higham, Accuracy and
Stability of Numerical Algorithms, chapter 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kernels_eval.protocol import Comparison
from kernels_eval.records import Reason

PRECISION_OF = {"float32": "fp32", "float64": "fp32", "float16": "fp16", "bfloat16": "bf16"}
PRECISION_OF |= {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
WORST = (
    *("rms", "reference_rms", "max", "reference_max", "sequential_rms"),
    *("wrong_share", "reference_wrong_share", "unequal"),
)
MOST_WRONG = 0.05
"""Largest share of elements that may be off by half of their own value where the reference's are
not: a few outputs that are far larger than all others make any error of these look small."""
E4M3 = 0.06
"""Gate of outputs in float8_e4m3fn: half a unit in the last place. The RMS error of one rounding is
at most 0.036 (relative spacing of 2^-3 / sqrt(12))."""
TIGHTEST = 1e-6
"""No gate asks for more of a sound fp32 kernel: 16 units in the last place."""
APPROXIMATE = 2e-3
"""Largest RMS(err)/RMS(oracle) of an approximation, which GELU by tanh has a tenth of."""
SPREAD = 10
"""Largest worst element / RMS error of a downcast. Rounding errors that are normal reach 5 among a
million elements; one wrong element of N reaches about sqrt(N)."""
REFERENCE_FACTOR = 8
"""A gate is never below this multiple of the fp32 reference's own error."""
SEQUENTIAL_FACTOR = 4
"""Nor below this multiple of the error of adding up the reference's long sums in fp32, one term
after the other."""


class Gates(NamedTuple):
    """Largest RMS(err)/RMS(oracle) of a task's precision, and of an element in fp32: |err| <= r
    (|y| + RMS(y)). Half precision: four roundings to 11 bits (fp16, TF32), or to 8 (bf16)."""

    fp32: float = 1e-5
    half: float = 2e-3
    bf16: float = 1.6e-2
    elementwise_fp32: float = 1e-4


GATES = Gates()
ALL = ("masks_match", "finite", "kernelbench_1e4", "kernelbench_1e2")


def merge(comparisons: Sequence[Comparison]) -> Comparison:
    """The worst of several output tensors, or of several trials. NaN is worse than any number."""
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
    """OK, or why this output is not the reference's: NON_FINITE, PRECISION_DOWNCAST, APPROXIMATION
    or WRONG_OUTPUT.

    `own_inputs`: KernelBench's tolerance counts, as these are the inputs that the task draws
    itself. `loosest`: what an answer that ignores the inputs must not pass; the gate is no larger,
    unless the reference's own error is.
    """
    if not measured.masks_match:
        return Reason.NON_FINITE
    base = {
        "fp32": gates.fp32,
        "fp16": gates.half,
        "bf16": gates.bf16,
        "e4m3": E4M3,
        "e5m2": 2 * E4M3,
    }[precision]
    own = REFERENCE_FACTOR * measured.reference_rms
    if precision in ("e4m3", "e5m2"):  # its own error is that of one rounding, and so is the gate
        own = base
    plain = SEQUENTIAL_FACTOR * measured.sequential_rms
    gate = min(max(base, own, plain), max(loosest, own, TIGHTEST))
    # The elementwise gate scales with the RMS gate (1e-4 belongs to 1e-5), and like it never asks
    # for more than the reference gives.
    elementwise = max(
        gate * gates.elementwise_fp32 / gates.fp32,
        REFERENCE_FACTOR * measured.reference_max,
    )
    if measured.rms <= gate and measured.max <= elementwise:
        most = max(MOST_WRONG, REFERENCE_FACTOR * measured.reference_wrong_share)
        return Reason.OK if measured.wrong_share <= most else Reason.WRONG_OUTPUT
    if precision != "fp32":
        return Reason.WRONG_OUTPUT
    if measured.systematic:
        # other inputs reach where an approximation is worst
        near = measured.kernelbench_1e4 if own_inputs else measured.kernelbench_1e2
        close = near and measured.rms <= APPROXIMATE
        return Reason.APPROXIMATION if close else Reason.WRONG_OUTPUT
    # The signature of a downcast: a small relative error spread over the whole output. A few wrong
    # elements are large against the RMS.
    least = max(gate, 10 * base, 10 * own if own > 4 * plain else 0.0)
    most = min(8 * gates.bf16, SPREAD * measured.rms)
    if least < measured.rms <= gates.bf16 and measured.max <= most:
        return Reason.PRECISION_DOWNCAST
    return Reason.WRONG_OUTPUT
