"""The second loop over the table of trials: compares a candidate's outputs with what is right.

A wrong answer ends the protocol with the reason that explains it best; where its row tolerates it,
it is a flag.
"""

from __future__ import annotations

import math

from kernels_eval.config import SCREEN_CALLS_S, SCREEN_FIRST_S
from kernels_eval.judge.attribution import check_state
from kernels_eval.judge.candidate_handle import CandidateProcess, unmatched_shapes
from kernels_eval.judge.explanation import (
    errors_of,
    explained,
    is_small,
    name_approximation,
    of_unwritten,
)
from kernels_eval.judge.messages import Stop
from kernels_eval.judge.trial import Stage, Trial, WrongAnswer
from kernels_eval.judge.trials import OTHER_INTEGER
from kernels_eval.model.correctness import merge
from kernels_eval.protocol import RENEWED, RENEWED_BUFFERS, SCALED, Comparison
from kernels_eval.records import Correctness, Reason

RAISED = (Reason.EXCEPTION, Reason.BUILD_FAILED)
"""What a candidate says of a call by itself: an exception, or one of its compiler (Triton takes
blocks of 2**n alone)."""


def compare_outputs(process: CandidateProcess) -> None:
    """Compare every trial in the task's own shape and mode. Raises Stop where one is wrong."""
    draft = process.draft
    compare_trials(process, Stage.OUTPUTS)
    _settle_approximation(process)
    draft.precision_class = process.reference.output_precision
    _check_calls(process)


def compare_trials(process: CandidateProcess, stage: Stage) -> None:
    """Compare this stage's trials that are expected and not yet compared; `screen` leaves some to
    `confirm`. Raises Stop for the first untolerated wrong answer.
    """
    if stage is Stage.OUTPUTS:
        process.draft.outputs_match = False  # until all are compared
    for trial in process.reference.trials:
        if trial.row.stage is not stage or trial.name in process.compared:
            continue
        if _left_to_confirm(process, stage):
            process.draft.flags.append("left_to_confirm")
            return
        started = process.work_s()
        try:
            first = not process.compared
            made, outcome, found = compare_trial(trial, process, first=first)
        except Stop as stop:
            _refuse_call(trial, stop, process)
            continue
        finally:
            process.trial_s.append(process.work_s() - started)
        process.compared[trial.name] = made, found
        if stage is Stage.OUTPUTS:
            process.draft.correctness = _correctness(process)
        if outcome is not Reason.OK:
            _refuse_answer(made, outcome, found, process)


def _left_to_confirm(process: CandidateProcess, stage: Stage) -> bool:
    """Whether later trials take long, or the first so long that another shape would compile
    again."""
    if process.config.level == "confirm" or not process.trial_s:
        return False
    first_s, *later_s = process.trial_s
    compiles = stage is Stage.VARIATIONS and first_s > SCREEN_FIRST_S
    return compiles or sum(later_s) > SCREEN_CALLS_S


def compare_trial(
    trial: Trial, process: CandidateProcess, *, first: bool = False
) -> tuple[Trial, Reason, Comparison]:
    """One compared call: trial, outcome and errors. The `first` call is repeated. Raises Stop where
    there is no answer.
    """
    own = trial.name
    if trial.weights:
        trial = _other_weights(trial, process)
    reruns = process.config.correctness.reruns if first else 0
    found = process.call(trial, reruns=reruns)
    outcome = accepted(trial, found, process)
    if outcome is Reason.WRONG_OUTPUT and trial.weights:
        found = _with_transposed(trial, found, process)
        outcome = accepted(trial, found, process)
    if outcome is Reason.OK and trial.name == SCALED and own == "other_weights":
        # a scale commutes with too much: packed by the constructor, all may be others
        trial = process.reference.packed_weights(RENEWED)
        found = process.call(trial)
        outcome = accepted(trial, found, process)
    return trial, outcome, found


def accepted(trial: Trial, found: Comparison, process: CandidateProcess) -> Reason:
    outcome = process.reference.judge(found, trial)
    if outcome is not Reason.APPROXIMATION:
        return outcome
    if trial.row.stage is Stage.LAST:
        return Reason.OK  # NaN and infinities are asked for, not digits
    draft = process.draft
    draft.approximation = draft.approximation or name_approximation(trial, found, process)
    return Reason.OK


def _refuse_call(trial: Trial, stop: Stop, process: CandidateProcess) -> None:
    row, reason = trial.row, stop.finding.reason
    if row.stage is Stage.OUTPUTS:
        raise stop
    if reason in RAISED and row.refusal_flag and not process.child.dead:
        process.draft.flags.append(row.refusal_flag)
    elif row.tolerated(_wrong(reason, process)):
        process.draft.flags.append(row.flag)
    else:
        raise _specialised(trial, reason, stop.finding.detail)


def _refuse_answer(
    trial: Trial, outcome: Reason, found: Comparison, process: CandidateProcess
) -> None:
    row = trial.row
    if row.tolerated(_wrong(outcome, process)):
        process.draft.flags.append(row.flag)
    elif row.reason is None:
        # a changed default dtype, say, explains more than the wrong output it leads to
        check_state(process, settings=True)
        raise explained(trial, outcome, found, process)
    else:
        if is_small(found):  # what is approximate elsewhere is so here
            check_formula(process)
        raise _specialised(trial, outcome, of_unwritten(found) + errors_of(trial, found))


def _wrong(reason: Reason, process: CandidateProcess) -> WrongAnswer:
    return WrongAnswer(
        reason,
        config=process.config.correctness,
        sums_products=process.reference.sums_products,
        dead=bool(process.child.dead),
    )


def _specialised(trial: Trial, reason: Reason, detail: str) -> Stop:
    shapes = [output.shape for output in trial.outputs[:4]]
    what = "settings" if trial.settings else "shape"
    what = "integers" if trial.name == OTHER_INTEGER else what
    return Stop(
        trial.row.reason or reason,
        f"right for the declared {what} only: {reason} where the outputs have the shapes {shapes}"
        f" ({trial.name}; correctness.shapes=flag accepts that): {detail}",
    )


def _settle_approximation(process: CandidateProcess) -> None:
    draft, formula = process.draft, process.config.correctness.formula
    if draft.approximation and not (draft.correctness and draft.correctness.kernelbench_1e4):
        raise Stop(Reason.WRONG_OUTPUT, draft.approximation.replace("within", "beyond"))
    if draft.approximation and formula == "flag":
        draft.flags.append(Reason.APPROXIMATION.value)
    draft.outputs_match = not draft.approximation or formula != "require"


def compare_non_finite(process: CandidateProcess) -> None:
    """Compare what a candidate makes of NaN and infinities, where that is only flagged."""
    if not process.child.gone:  # what came before may have ended it
        compare_trials(process, Stage.LAST)


def check_formula(process: CandidateProcess) -> None:
    if process.draft.approximation and process.config.correctness.formula == "require":
        raise Stop(Reason.APPROXIMATION, process.draft.approximation)


def _check_calls(process: CandidateProcess) -> None:
    calls = process.calls
    if process.needs_copy:
        process.draft.flags.append("shared_output")
    if any(call.previous_changed for call in calls):
        if not process.may_overwrite:
            raise Stop(
                Reason.OUTPUT_ALIASED,
                "a later call overwrites the output of an earlier one (make a new one in each"
                " call; correctness.output_buffer=flag accepts that)",
            )
        process.draft.flags.append(Reason.OUTPUT_ALIASED.value)
    if any(call.mutated for call in calls):
        raise Stop(
            Reason.INPUT_MUTATED,
            "the inputs are changed in place; the reference leaves them alone",
        )


def _other_weights(trial: Trial, process: CandidateProcess) -> Trial:
    if trial.weights == RENEWED_BUFFERS:
        lacks = process.loaded.lacks_drawn
        if not lacks or not process.reference.drawn_matter(lacks):
            return trial
        process.draft.flags.append("weights_not_mappable")
        return process.reference.packed_weights(RENEWED)
    reference, shapes = process.reference, process.reference.loaded.parameters
    missing, spare = unmatched_shapes(shapes, process.loaded.parameters)
    if not missing or not reference.weights_matter(missing):
        missing = []
    wanted = [shapes[index] for index in missing]
    # it stays what it is: running statistics are such numbers, too
    constant = not set(missing).isdisjoint(reference.loaded.structured)
    statistics = reference.used_statistics()
    held = [shape for shape in process.loaded.statistics if shape in statistics]
    if statistics and not held and _fits_without_frozen(process):
        process.frozen_statistics = True
        held = [shape for shape in process.loaded.frozen if shape in statistics]
    if sorted(held) != sorted(statistics):
        wanted += statistics
        constant = True
        spare += sum(map(math.prod, process.loaded.statistics))
    if not wanted:
        return trial
    if spare < sum(map(math.prod, wanted)):
        raise Stop(
            Reason.STALE_WEIGHTS,
            f"has no nn.Parameter (for running statistics: or buffer) for"
            f" {_names_without(missing, process)}, of shape {wanted[:4]}, which the reference's"
            " output hangs on: is it left out, kept as it was constructed, or added to another in"
            " the constructor?",
        )
    if constant:
        raise Stop(
            Reason.STALE_WEIGHTS,
            "has no nn.Parameter (for buffers: or buffer) of the shape of what the reference's"
            " constructor makes of one number, of equal parts or as a rotation: whether it is used"
            f" cannot be told (keep such weights as they are, and pack others): {wanted[:4]}",
        )
    # packed, perhaps: all parameters of both are then multiplied by one number
    process.draft.flags.append("weights_not_mappable")
    return reference.packed_weights(SCALED)


def _names_without(missing: list[int], process: CandidateProcess) -> str:
    """What the reference calls weights that a candidate has no parameter for."""
    loaded, own = process.reference.loaded, process.loaded.parameter_names
    shapes = [loaded.parameters[index] for index in missing]
    pairs = zip(loaded.parameter_names, loaded.parameters, strict=True)
    lacking = [name for name, shape in pairs if shape in shapes and name not in own]
    if len(lacking) != len(missing):
        lacking = [loaded.parameter_names[index] for index in missing]
    return ", ".join(lacking[:4]) or "running statistics"


def _fits_without_frozen(process: CandidateProcess) -> bool:
    others = list(process.loaded.parameters)
    for shape in process.loaded.frozen:
        if shape in others:
            others.remove(shape)
    return not unmatched_shapes(process.reference.loaded.parameters, others)[0]


def _with_transposed(trial: Trial, found: Comparison, process: CandidateProcess) -> Comparison:
    if not any(len(shape) == 2 and shape[0] == shape[1] for shape in process.loaded.parameters):
        return found
    again = process.call(trial, transposed=True)
    process.transposed = process.reference.judge(again, trial) is Reason.OK
    return again if process.transposed else found


def _correctness(process: CandidateProcess) -> Correctness:
    """The worst over all trials but hard ones; KernelBench's tolerances over own inputs."""
    outputs = [each for each in process.compared.values() if each[0].row.stage is Stage.OUTPUTS]
    worst = merge([found for trial, found in outputs if not trial.row.hard])
    own = merge([found for trial, found in outputs if trial.own_inputs])
    return Correctness(
        trials=len(outputs),
        rms_error=worst.rms,
        reference_rms_error=worst.reference_rms,
        max_error=worst.max,
        kernelbench_1e4=own.kernelbench_1e4,
        kernelbench_1e2=own.kernelbench_1e2,
        oracle=process.reference.expected.oracle,
    )
