"""Why an output is not the reference's: the reason and one line of a verdict."""

from __future__ import annotations

import re
from contextlib import nullcontext

from kernels_eval.config import FORMULA_NAMED, LOOSE_MATH_RMS, SAME_ERROR_SHARE, WIDEST
from kernels_eval.judge.candidate_handle import CandidateProcess
from kernels_eval.judge.conditions import has_layers, iterates
from kernels_eval.judge.messages import Stop
from kernels_eval.judge.trial import Trial
from kernels_eval.model.correctness import MANTISSA
from kernels_eval.protocol import (
    APART,
    BEYOND,
    BLOCKS,
    DECISIONS,
    DECLARED,
    FAINT,
    FEW_SLICES,
    GELU_BY_TANH,
    LASTING_INPUTS,
    LASTING_STATES,
    LATER,
    LONE,
    MUTATED,
    NON_FINITE,
    OUTLIERS,
    PATH,
    RARE,
    RELATED,
    SHIFTED_WEIGHTS,
    UNSORTED,
    UPPER_BITS,
    VARIED,
    WHOLE_RANGE,
    Comparison,
    domain_of,
    is_untamed,
    operands_in,
)
from kernels_eval.records import Reason

NUMBERS = (Reason.WRONG_OUTPUT, Reason.PRECISION_DOWNCAST)
"""What numbers beyond their gates are called until something explains them."""

NO_TF32 = (
    'Triton\'s tl.dot takes TF32 by default: give it input_precision="ieee", or allow_tf32=False;'
    " in CUDA, no TF32 math mode of cuBLAS or cuDNN, and no mma of tf32"
)
MIXED, FAR_INPUTS = "mixed", "normal_x100"
UNTAMED_TRIALS = ("lasting_weights", "large_weights", "leading_weights", *SHIFTED_WEIGHTS)
OTHER_SIZES = (
    "right with ordinary weights, not with large ones or rows of different sizes: does it take for"
    " granted what these give (one sign, a small range, a constant)?; "
)
LOST_DIGITS = (
    "digits are lost for some numbers: do terms cancel there (log(x + sqrt(x^2 + 1)) for negative"
    " x: of |x|, with x's sign; log1p, expm1)?; "
)
OVERFLOWS = (
    "an exp that overflows? (subtract the maximum of what is summed; take exp(-|x|) for sigmoid,"
    " softplus and tanh; with -ffast-math, compilers assume that nothing overflows)"
)
LOOSE_MATH = re.compile(r"fast[-_]math\b|-Ofast\b|-funsafe-math")
"""Compiler flags that give up digits."""
MUTATIONS = (MUTATED, RELATED, FEW_SLICES)
UNDEFINED = (
    "right on ordinary arguments, not on mutated ones (slices that are zero, equal or far larger;"
    " other integers, lengths or indices): 0 log(0), 0 / 0, an exp that overflows, or memory that"
    " is not written?; "
)
READ_ELSEWHERE = (
    "is something read out of bounds or of a view, before it is written, or from an answer that was"
    " given?; "
)
FEW = dict.fromkeys(
    (LONE, OUTLIERS),
    "right for the declared inputs, not with a few other elements or one other row: does it look at"
    " a part of them only? ",
) | dict.fromkeys(
    DECISIONS,
    "right on ordinary inputs, not where a comparison of the task's comes out otherwise than there"
    " (equal or near rows, runs that come again or in reverse, parts of one argument in another):"
    " is one left out?; ",
)
RIGHT_ELSEWHERE = {
    "large": (
        "right on ordinary inputs, not on normal ones times {factor}, where the reference is:"
        f" {OVERFLOWS}; "
    ),
    "offset": (
        "right on ordinary inputs, not around a large mean, where the reference is: what cancels"
        " there (E[x^2] - E[x]^2, |x|^2 - 2 x y + |y|^2) has no digit left, and may be negative"
        " (subtract before squaring, or use Welford's updates); "
    ),
    "offset_in_float64": (
        "right to the digits of fp32, where the task computes in float64: keep its sums and"
        " differences there; "
    ),
    "small": (
        "right on ordinary inputs, not on normal ones divided by 16384, where the reference is: is"
        " an epsilon added that it does not add, or elsewhere, or what adds little left out?; "
    ),
    **dict.fromkeys(
        (BLOCKS, LASTING_INPUTS, *UNTAMED_TRIALS),
        "right on ordinary numbers, not on large ones, matrices that are hardly coupled or almost"
        " of rank one or tables of permutations, which forget late: does it make fewer steps,"
        " iterations or terms than the task?; ",
    ),
    UNSORTED: (
        "right for ids in order only, though the task takes them in any order (one that needs them"
        " in order raises otherwise): or is an argument not read?; "
    ),
    **dict.fromkeys(
        LASTING_STATES,
        "right on ordinary inputs, not where most elements along an axis are one, or few in turn,"
        " and what comes last still depends on what comes first: is a part of it not read?; ",
    ),
    PATH: "right on ordinary masks, not on one long path: does it iterate less than the task?; ",
    VARIED: (
        "right only for arguments with what the declared ones happen to have (all one number, a"
        " float's size, zeros or a mask's elements at these places, symmetry, equal rows, whole"
        " numbers, distinct or no negative indices, no label to ignore, no length of 0); "
    ),
    RARE: (
        "right only for arguments without what these have: a probability of 0, a row that is masked"
        " whole, integers up to 2^28 (sorted or multiplied ones: 2^20), exponents up to 16; "
    ),
    BEYOND[0]: (
        "right within the declared range of whole numbers (counts, levels, times, places), not for"
        " larger or negative ones, which the task takes, or whose sums 32 bits do not hold; "
    ),
    WHOLE_RANGE[0]: (
        "right within the declared range of integers of few bits (or bytes), not for others that"
        " these bits hold, which the task takes (do sums or products need more bits?); "
    ),
    **dict.fromkeys(
        (FAINT, APART),
        "right on ordinary inputs, not where the answer is tiny, as all inputs are small or one"
        " argument is far from the others: is what adds little left out?; ",
    ),
    UPPER_BITS: (
        "right where 32 bits hold every integer, not where some differ in their upper 32 alone,"
        " which the task tells apart; "
    ),
    **dict.fromkeys(
        MUTATIONS,
        "right on ordinary arguments, not on mutated ones (slices that are like others, shifted,"
        " scaled, sorted or zero; other integers, lengths, indices or densities of masks): is an"
        " argument not read, or what is near, or far from a diagonal, left out?; ",
    ),
    NON_FINITE: (
        "right for numbers, not for NaN and infinities among the inputs, which the task asks for,"
        " replaces or counts; "
    ),
} | FEW
"""What fails on some inputs, and what is right on others, by the trial's name."""
OTHER_WEIGHTS = (
    "its constructor makes others from the same seed (make the same parameters in the same order,"
    " as its layers do; or set correctness.weights=copy, as harnesses that copy them do)"
)
EXPLANATIONS = {
    GELU_BY_TANH: (
        Reason.WRONG_OUTPUT,
        "GELU by tanh explains the error, where the task asks for GELU by erf; ",
    ),
    "TF32": (
        Reason.PRECISION_DOWNCAST,
        "factors in TF32 (or fp16) explain the error: keep them in fp32; ",
    ),
    **{
        short: (
            Reason.PRECISION_DOWNCAST,
            f"factors in {short} explain the error: keep them in fp32; ",
        )
        for short in ("bf16", "fp16")
    },
    **{
        operands_in(short): (
            Reason.PRECISION_DOWNCAST,
            f"numbers in {said} explain the error: keep them in fp32; ",
        )
        for short, said in {"TF32": "TF32 (or fp16)", "bf16": "bf16", "fp16": "fp16"}.items()
    },
}


def explained(trial: Trial, outcome: Reason, found: Comparison, process: CandidateProcess) -> Stop:
    """The reason and one line for a wrong output, given how it was obtained."""
    calls, wrong = process.calls, outcome is Reason.WRONG_OUTPUT
    small = outcome in NUMBERS and is_small(found)
    if LATER in found.equals_trial:
        outcome, why = Reason.OUTPUT_ALIASED, "a later call overwrites an earlier output; "
    elif trial.weights and DECLARED in found.equals_trial:
        outcome, why = Reason.STALE_WEIGHTS, "right for the weights seen at construction only; "
    elif found.equals_trial and trial.name not in FEW:
        outcome = Reason.STALE_CACHE
        why = f"returns the answer of an earlier call ({found.equals_trial[0]}) for new inputs; "
    elif any(call.previous_changed for call in calls) and not process.may_overwrite:
        outcome, why = Reason.OUTPUT_ALIASED, "a later call overwrites an earlier output; "
    elif any(call.rerun_differs for call in calls) and _error_varies(trial, found, process):
        outcome = Reason.NON_DETERMINISTIC
        why = "repeating the call on the same inputs gives another answer; "
    elif small and (cause := _cause(trial, found, process)):
        outcome, why = cause
    elif wrong and trial.name not in FEW and _ignores_inputs(trial, found, process):
        outcome, why = Reason.INPUT_INDEPENDENT, "gives the same answer for different inputs; "
    elif (wrong or outcome is Reason.NON_FINITE) and (own := _own_weights(trial, found, process)):
        outcome, (why, found) = Reason.WRONG_OUTPUT, own
    elif wrong and (name := _wrong_gradient(found, process)):
        outcome, why = Reason.WRONG_GRADIENT, f"the gradient of {name} is wrong; "
    elif outcome in NUMBERS and (name := _wrong_effect(found, process)):
        outcome = Reason.WRONG_OUTPUT
        why = (
            f"{name} does not hold after the call what the reference's does: what a call changes is"
            " an output (keep buffers under the reference's names, and update them in every call"
            " in which it does; write arguments that it changes in place); "
        )
    elif outcome is Reason.NON_FINITE:
        outcome, why = _of_non_finite(trial, found, process)
    elif outcome is Reason.PRECISION_DOWNCAST:
        outcome, why = _unexplained_downcast(trial, found, process)
        why = why or _right_elsewhere(trial, found, process)
    else:
        why = _of_wrong_output(trial, found, process) if wrong else ""
    if outcome is Reason.PRECISION_DOWNCAST and _late(trial):
        # other trials would have shown it; what is left out may err as much
        outcome, why = Reason.WRONG_OUTPUT, _right_elsewhere(trial, found, process)
    return Stop(outcome, why + errors_of(trial, found))


def _late(trial: Trial) -> bool:
    """Whether its inputs or weights forget late: more steps matter there than elsewhere."""
    return is_untamed(trial.weights) or trial.name == LASTING_INPUTS


def _of_wrong_output(trial: Trial, found: Comparison, process: CandidateProcess) -> str:
    if why := of_unwritten(found):
        return why
    computed = found.model_copy(update={"only_chosen": False, "misplaced": 0})
    if found.only_chosen and process.reference.judge(computed, trial) is Reason.OK:
        return (
            "the reference moves and chooses numbers, and computes none: they must be its own, but"
            " for a few roundings (are digits left out?); "
        )
    if found.misplaced:
        return (
            f"{found.misplaced} neighbours are in order in the reference's output, not in this (are"
            " they sorted by a part of their digits?); "
        )
    if found.offset:
        return "the error is nearly the same number everywhere (is a constant off, or left out?); "
    if loose := loose_math(found, process):
        return loose
    if found.systematic and not found.only_chosen and found.rms < FORMULA_NAMED:
        return "another formula (an approximation?): the error is a function of the output; "
    if _has_edges(trial) and found.max < WIDEST.half:
        return LOST_DIGITS
    return _right_elsewhere(trial, found, process)


def loose_math(found: Comparison, process: CandidateProcess) -> str:
    """What to say of a small error where a candidate's builds ask for fewer digits."""
    loose = next(filter(LOOSE_MATH.search, process.compiler_flags), "")
    if not loose or found.rms > LOOSE_MATH_RMS:
        return ""
    return (
        f"built with {loose}, which takes approximations of exp, tanh, sqrt and division, and zero"
        " for what is tiny: build without it; "
    )


def _has_edges(trial: Trial) -> bool:
    return trial.distribution.startswith(("edges", "ends"))


def _of_non_finite(
    trial: Trial, found: Comparison, process: CandidateProcess
) -> tuple[Reason, str]:
    if trial.distribution == NON_FINITE:
        return Reason.NON_FINITE, _right_elsewhere(trial, found, process)
    if _right_without_fences(trial, process):
        why = "reads before or after the memory of its inputs, where it now finds NaN; "
        return Reason.MEMORY_ERROR, why
    large = f"{OVERFLOWS}, or " if trial.name == MIXED else ""  # it has large numbers, too
    where = UNDEFINED if trial.name in MUTATIONS else _right_elsewhere(trial, found, process)
    return Reason.NON_FINITE, "NaN or infinity in other places than in the reference: " + (
        of_unwritten(found) or large + (where or READ_ELSEWHERE)
    )


def of_unwritten(found: Comparison) -> str:
    if not found.unwritten:
        return ""
    return (
        f"{found.unwritten} elements of the output hold what free memory was filled with: they are"
        " never written (does its grid cover all of it, with every block size that it may take?); "
    )


def _right_without_fences(trial: Trial, process: CandidateProcess) -> bool:
    if trial not in process.reference.trials:
        return False  # its inputs are gone
    process.fenced = False
    try:
        return process.reference.judge(process.call(trial), trial) is Reason.OK
    except Stop:
        return False
    finally:
        process.fenced = True


def _own_weights(
    trial: Trial, found: Comparison, process: CandidateProcess
) -> tuple[str, Comparison] | None:
    """Where other weights are to blame, alone or for most of an error: that, and the error to
    tell of, which is what the reference's weights leave."""
    reference = process.reference
    if trial.name != DECLARED or process.copies_weights or not reference.loaded.weight_bytes:
        return None
    try:
        process.copy_weights()
        again = process.call(trial)
    except Stop:
        return None
    before, after = (reference.judge(each, trial) for each in (found, again))
    if after is Reason.OK or (after is Reason.APPROXIMATION and before is not after):
        return f"right with the reference's weights: {OTHER_WEIGHTS}; ", found
    if not is_small(again) or is_small(found):
        return None
    _, why = _cause(trial, again, process) or (Reason.WRONG_OUTPUT, "the answer is wrong, too: ")
    return f"{OTHER_WEIGHTS}; and with the reference's, {why}", again


def is_small(found: Comparison) -> bool:
    return found.masks_match and found.rms < WIDEST.bf16


def name_approximation(trial: Trial, found: Comparison, process: CandidateProcess) -> str:
    """What is approximate in an answer within KernelBench's 1e-4, and how far off it is."""
    cause = _cause(trial, found, process)
    own = None if cause else _own_weights(trial, found, process)
    if own:
        process.rebuild()
    _, why = cause or (
        Reason.APPROXIMATION,
        f"the error is a function of the output; {loose_math(found, process)}",
    )
    what, why = ("other weights", own[0]) if own else ("another formula", why)
    return f"{what}, within KernelBench's 1e-4: {why}{errors_of(trial, found)}"


def _cause(trial: Trial, found: Comparison, process: CandidateProcess) -> tuple[Reason, str] | None:
    """What explains a small error of an fp32 or fp64 output."""
    reference = process.reference
    mantissa = MANTISSA.get(found.precision)
    if not mantissa or trial not in reference.trials:
        return None
    effect = bool(_wrong_effect(found, process))
    if found.lost_bits and not effect:
        kept = mantissa - found.lost_bits
        why = f"its outputs keep {kept} bits of mantissa, {found.precision} has {mantissa}; "
        return Reason.PRECISION_DOWNCAST, why
    by = reference.explain(trial.name, found.worst if effect else None).by
    if by == "TF32" and _on_gpu(process):
        return Reason.PRECISION_DOWNCAST, f"{EXPLANATIONS[by][1]}{NO_TF32}; "
    return EXPLANATIONS.get(by)


def _unexplained_downcast(
    trial: Trial, found: Comparison, process: CandidateProcess
) -> tuple[Reason, str]:
    small = found.rms <= WIDEST.half  # as what TF32 and fp16 cost
    if small and found.precision == "fp64":
        return Reason.PRECISION_DOWNCAST, "the task's precision is fp64: compute in double; "
    if loose := loose_math(found, process):
        return Reason.WRONG_OUTPUT, loose
    advice = f" ({NO_TF32})" if _on_gpu(process) else ""
    known = trial in process.reference.trials
    deep = has_layers(process.reference.expected.task)
    if deep and known and not _late(trial):
        if as_large := process.reference.explain(trial.name).as_large:
            return Reason.WRONG_OUTPUT, (
                f"the reference errs as much with {as_large}, at other places, as models of many"
                f" layers do: is it that, or is a term left out?{advice}; "
            )
    if not small:
        return Reason.WRONG_OUTPUT, ""
    if not known:  # right in all of them, and nothing can be asked
        return Reason.PRECISION_DOWNCAST, f"the error is as large as TF32's and fp16's{advice}; "
    return Reason.WRONG_OUTPUT, (
        "the error is as small as TF32's or fp16's, but is not what the reference gives with these:"
        f" is a term left out, or are some digits?{advice}; "
    )


def _on_gpu(process: CandidateProcess) -> bool:
    return process.reference.device.startswith("cuda")


def _wrong_gradient(found: Comparison, process: CandidateProcess) -> str:
    loaded = process.reference.loaded
    effects = len(loaded.effects.names) if loaded.effects else 0
    names = loaded.gradients.names if loaded.gradients else []
    return _nth_last(names, effects, found, process)


def _wrong_effect(found: Comparison, process: CandidateProcess) -> str:
    effects = process.reference.loaded.effects
    return _nth_last(effects.names if effects else [], 0, found, process)


def _nth_last(names: list[str], after: int, found: Comparison, process: CandidateProcess) -> str:
    place = found.worst - len(process.reference.trials[0].outputs) + after
    return names[place] if -len(names) <= place < 0 else ""


def _right_elsewhere(trial: Trial, found: Comparison, process: CandidateProcess) -> str:
    if trial.name in UNTAMED_TRIALS and not iterates(process.reference.expected.task):
        return LOST_DIGITS if found.max < WIDEST.half else OTHER_SIZES
    if trial.name in RIGHT_ELSEWHERE:
        drawn = trial.distribution.removesuffix(domain_of(trial.distribution))
        return RIGHT_ELSEWHERE[trial.name].format(factor=drawn.rpartition("_x")[2])
    if trial.earlier_seeds:
        return (
            "right in its first call, wrong in a later one: the reference keeps something from call"
            " to call, which its outputs tell of; "
        )
    if not trial.weights:
        edges = (
            "is it wrong for numbers ten times as large (a formula for small ones?), for halves,"
            " thresholds, ends of a domain or rows of zeros alone? "
        )
        return edges if _has_edges(trial) else ""
    return (
        "right with the weights of the earlier calls (are some kept since then, changed in the"
        " constructor, or in another order than the reference's parameters of their shape?); "
    )


def errors_of(trial: Trial, found: Comparison) -> str:
    if found.unequal:
        return (
            f"{found.unequal} integers or truth values of an output are not the reference's on"
            f" {trial.name} inputs, and rounding does not explain them: round as it does"
            " (std::nearbyint for torch.round, std::floor for a floor division, truncation for a"
            " cast), and return among equal elements the one that it returns"
        )
    errors = f"relative RMS error {found.rms:.2e}, worst element {found.max:.2e} "
    finite = found.masks_match or found.rms > 0
    return f"{errors * finite}on {trial.name} inputs"


def _error_varies(trial: Trial, found: Comparison, process: CandidateProcess) -> bool:
    if trial not in process.reference.trials:
        return False  # its inputs are gone
    try:
        again = process.call(trial)
    except Stop:
        return True
    return abs(again.rms - found.rms) > SAME_ERROR_SHARE * found.rms


def _ignores_inputs(trial: Trial, found: Comparison, process: CandidateProcess) -> bool:
    others = [
        other
        for other in process.reference.trials
        if other.shape == DECLARED and not other.weights and other is not trial
    ]
    if found.equals_answer and not found.constant:
        return True
    if trial.name != DECLARED and not found.constant:
        return False
    form = FAR_INPUTS if found.constant else DECLARED
    another = nullcontext(others[0]) if others else process.reference.drawn_again(form)
    try:
        with another as other:
            if found.constant:  # it may come of a clamp, which larger numbers pass
                asked = [process.call(each) for each in (other, *others[1:])]
                return all(each.constant and each.equals_answer for each in asked)
            return DECLARED in process.call(other).equals_answer
    except Stop:
        return False
