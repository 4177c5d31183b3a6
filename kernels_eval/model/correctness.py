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
    EXACT_GATES,
    FAR,
    FORMULA_LEFT,
    GATES,
    HARD_GATES,
    LONE_GATES,
    MOST_WRONG_SHARE,
    MOST_WRONG_SLICE,
    REFERENCE_FACTOR,
    REFERENCE_FACTOR_HALF,
    SCATTER_FACTOR,
    SEQUENTIAL_FACTOR,
    TIGHTEST_GATE,
    UNIT_FACTOR,
    UNIT_GATES,
    WIDEST,
    Gates,
)
from kernels_eval.protocol import LONE_TERMS, UNIT_FACTORS, Comparison
from kernels_eval.records import Reason

WORST = (
    *("rms", "reference_rms", "max", "reference_max", "sequential_rms", "scatter_rms"),
    *("scatter_max", "widest", "left_rms", "wrong_share", "reference_wrong_share"),
    *("wrong_slice", "reference_wrong_slice"),
    *("lost_bits", "unequal", "misplaced"),
)


PRECISION_OF = {"float16": "fp16", "bfloat16": "bf16", "float64": "fp64", "complex128": "fp64"}
PRECISION_OF |= {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
MANTISSA = {"fp32": 23, "fp64": 52}
"""Bits of what is judged as precise."""
ALL = ("masks_match", "kernelbench_1e4", "kernelbench_1e2")


def merge(comparisons: Sequence[Comparison]) -> Comparison:
    """The worst of several output tensors, or trials. NaN is worse than any number."""
    found = [vars(comparison) for comparison in comparisons]
    return Comparison(
        precision=next((each["precision"] for each in found if each["precision"]), ""),
        systematic=any(each["systematic"] for each in found),
        offset=any(each["offset"] for each in found),
        only_chosen=any(each["only_chosen"] for each in found),
        ordered=any(each["ordered"] for each in found),
        **{name: max((each[name] for each in found), key=_nan_last) for name in WORST},
        **{name: all(each[name] for each in found) for name in ALL},
    )


def _nan_last(error: float) -> tuple[bool, float]:
    return math.isnan(error), error


def answer_of(
    outputs: Sequence[Comparison], own: Sequence[Comparison], *, hard: bool = False
) -> Comparison:
    """The errors of an answer, with `own` ones of the reference, both by output: as each has its
    gates, those of the one that is farthest beyond.
    """
    gates, whole = HARD_GATES if hard else GATES, merge(outputs)
    pairs = zip(own, outputs, strict=True)
    answers = [merge(pair).model_copy(update={"worst": place}) for place, pair in enumerate(pairs)]
    worst = max(answers, key=lambda answer: _beyond(answer, gates))
    return worst.model_copy(update={name: getattr(whole, name) for name in (*ALL, "unequal")})


def _beyond(measured: Comparison, gates: Gates) -> tuple[bool, bool, float]:
    wrong = judge(measured, gates) is not Reason.OK
    return wrong, *_nan_last(measured.rms / gates.of(measured.precision or "fp32"))


def judge(
    measured: Comparison,
    gates: Gates = GATES,
    *,
    own_inputs: bool = True,
    loosest: float = math.inf,
    far: bool = False,
) -> Reason:
    """OK, or NON_FINITE, PRECISION_DOWNCAST, APPROXIMATION or WRONG_OUTPUT, by the gates of its
    precision (fp32 where outputs have none).

    `own_inputs`: KernelBench's tolerance counts, on inputs of the task's own. `loosest`: the gate's
    upper limit (an answer that ignores the inputs), unless the reference's own error is larger.
    `far`: only an error of many times the gate counts.
    """
    if not measured.masks_match:
        return Reason.NON_FINITE
    precision = measured.precision or "fp32"
    base, fp8 = gates.of(precision), precision in ("e4m3", "e5m2")
    factor = REFERENCE_FACTOR if precision in MANTISSA else REFERENCE_FACTOR_HALF
    # FP8's own error is that of one rounding, and so is its gate
    own = base if fp8 else factor * measured.reference_rms
    plain = SEQUENTIAL_FACTOR * measured.sequential_rms
    scatter = 0.0 if fp8 else SCATTER_FACTOR * measured.scatter_rms
    gate = min(max(base, own, plain, scatter), max(loosest, own, TIGHTEST_GATE))
    if far:
        return Reason.WRONG_OUTPUT if measured.rms > FAR * gate else Reason.OK
    # like the RMS gate it never asks for more than the reference gives
    elementwise = max(
        ELEMENT_FACTOR * gate,
        min(gates.elementwise_fp32, ELEMENT_FACTOR * loosest) if precision == "fp32" else 0.0,
        factor * measured.reference_max,
        SCATTER_FACTOR * measured.scatter_max,
    )
    if precision in MANTISSA and measured.lost_bits and measured.rms <= WIDEST.bf16:
        return Reason.PRECISION_DOWNCAST
    # what computes nothing has one answer; constants in float64 are others than the reference's
    roundings = EXACT_GATES.of(precision) * base / GATES.of(precision)
    exact = not measured.only_chosen or measured.rms <= max(measured.reference_rms, roundings)
    if measured.rms <= gate and measured.max <= elementwise:
        most = max(MOST_WRONG_SHARE, REFERENCE_FACTOR * measured.reference_wrong_share)
        of_slice = max(MOST_WRONG_SLICE, REFERENCE_FACTOR * measured.reference_wrong_slice)
        few = measured.wrong_share <= most and measured.wrong_slice <= of_slice
        return Reason.OK if few and exact and not measured.misplaced else Reason.WRONG_OUTPUT
    if precision not in MANTISSA:
        return Reason.WRONG_OUTPUT
    if measured.systematic:
        # other inputs reach where an approximation is worst
        near = measured.kernelbench_1e4 if own_inputs else measured.kernelbench_1e2
        left = measured.left_rms <= max(gate, FORMULA_LEFT * measured.rms)
        close = exact and near and left and measured.rms <= min(APPROXIMATION_RMS, loosest)
        return Reason.APPROXIMATION if close else Reason.WRONG_OUTPUT
    # The signature of a downcast: a small relative error spread over the whole output. A few wrong
    # elements are large against the RMS.
    least = max(gate, 10 * base, 10 * scatter, plain, 10 * own if own > 4 * plain else 0.0)
    most = min(8 * WIDEST.bf16, DOWNCAST_SPREAD * measured.rms)
    if least < measured.rms <= WIDEST.bf16 and measured.max <= most:
        return Reason.PRECISION_DOWNCAST
    return Reason.WRONG_OUTPUT


def judge_terms(measured: Comparison, kind: str, loosest: float = math.inf) -> Reason:
    """What an answer is on inputs of few terms of this kind."""
    gates = LONE_GATES if kind == LONE_TERMS else GATES
    found = judge(measured, gates, own_inputs=False, loosest=loosest)
    if found is Reason.OK and kind == UNIT_FACTORS and not _exact_factors(measured):
        return Reason.WRONG_OUTPUT
    return found


def _exact_factors(measured: Comparison) -> bool:
    """Whether products of ones are the other factor."""
    own = UNIT_FACTOR * measured.reference_rms, SCATTER_FACTOR * measured.scatter_rms
    return measured.rms <= max(UNIT_GATES.of(measured.precision or "fp32"), *own)


def hangs_on_scatter(measured: Comparison) -> bool:
    """Whether only the scatter of outputs, not measured yet, could make this answer right."""
    if measured.precision not in (*MANTISSA, "fp16", "bf16") or judge(measured) is Reason.OK:
        return False
    most = most_scatter(measured.widest, measured.precision)
    widened = {"scatter_rms": most, "scatter_max": ELEMENT_FACTOR * most}
    return judge(measured.model_copy(update=widened)) is Reason.OK


def most_scatter(widest: float, precision: str) -> float:
    """Of an output of this precision, which comes from what has this `widest` gate."""
    return max(widest, WIDEST.of(precision or "fp32")) / SCATTER_FACTOR
