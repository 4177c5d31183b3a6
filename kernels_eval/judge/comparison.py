"""The steps of the protocol: outputs compared with the expected ones, and why one is wrong; then
how a candidate works: whether its kernels do the work, and what it leaves running or changed."""

from __future__ import annotations

import math
import re
import time
from contextlib import suppress

from kernels_eval.compile.linked import library_work
from kernels_eval.judge.candidate_handle import CandidateProcess, unmatched_shapes
from kernels_eval.judge.messages import FIX_OF_CHANGE, REASON_OF_CHANGE, Stop, one_line
from kernels_eval.judge.reference_handle import ReferenceProcess
from kernels_eval.model.correctness import merge
from kernels_eval.model.trials import Trial
from kernels_eval.protocol import (
    DECLARED,
    LATER,
    Comparison,
    MeasureShare,
    NameOperators,
    ReadState,
    ReplaceWritten,
)
from kernels_eval.records import Correctness, Reason
from kernels_eval.sandbox.sandbox import Child

MAY_DIFFER = re.compile(r"atomic|reduction\s*\(|mutex|\bomp\s+critical\b", re.IGNORECASE)
"""Sources whose results may differ in the last bits between two runs: the order of their additions
is not fixed."""
OPERATORS_MAY_DIFFER = re.compile(
    r"aten\.(_?conv|cudnn_conv|miopen_conv|mkldnn_conv|slow_conv"
    r"|index_(add|copy|put|reduce)|scatter|put_|cumsum|histc|bincount|kthvalue"
    r"|median|_?embedding_bag|upsample|grid_sampl)"
)
"""Operators of torch for which the same holds on a GPU (the list in the documentation of
torch.use_deterministic_algorithms)."""


def compare_outputs(process: CandidateProcess) -> None:
    """Every trial in the task's own shape and mode: right outputs for unseen inputs, other
    distributions, reused storage and other weights."""
    reference, draft = process.reference, process.draft
    draft.outputs_match = False
    measured: list[tuple[Trial, Comparison]] = []
    for trial in reference.trials:
        if not trial.own_mode:
            continue
        if trial.weights_seed is not None:
            trial = _other_weights(trial, process)
        reruns = 0 if measured else process.config.correctness.reruns
        found = process.call(trial, reruns=reruns)
        outcome = accepted(trial, found, process)
        if outcome is Reason.WRONG_OUTPUT and trial.weights_seed is not None:
            found = _with_transposed(trial, found, process)
            outcome = accepted(trial, found, process)
        measured.append((trial, found))
        draft.correctness = _correctness(measured, reference)
        if outcome is Reason.WRONG_OUTPUT and trial.name == "offset" and reference.sums_products:
            draft.flags.append("offset_inputs_differ")  # honest sums of that length may err so
        elif outcome is not Reason.OK:
            # a changed default dtype, say, explains more than the wrong output it leads to
            check_state(process)
            raise explained(trial, outcome, found, process)
    if draft.approximation and not (draft.correctness and draft.correctness.kernelbench_1e4):
        raise Stop(Reason.WRONG_OUTPUT, draft.approximation.replace("within", "beyond"))
    formula = process.config.correctness.formula
    if draft.approximation and formula == "flag":
        draft.flags.append(Reason.APPROXIMATION.value)
    draft.outputs_match = not draft.approximation or formula != "require"
    if any(call.expanded for call in process.calls):
        draft.flags.append("expanded_output")
    draft.precision_class = reference.precision
    if any(call.previous_changed for call in process.calls):
        raise Stop(Reason.OUTPUT_ALIASED, "a later call overwrites the output of an earlier one")
    if any(call.mutated for call in process.calls) and not reference.loaded.mutates:
        raise Stop(
            Reason.INPUT_MUTATED,
            "the inputs are changed in place; the reference leaves them alone",
        )


def accepted(trial: Trial, found: Comparison, process: CandidateProcess) -> Reason:
    """OK for a right answer, and for an approximation, which is noted: what it means is decided
    when all else is known. Otherwise the reason why it is neither."""
    outcome = process.reference.judge(found, trial)
    if outcome is not Reason.APPROXIMATION:
        return outcome
    process.draft.approximation = process.draft.approximation or (
        "another formula, within KernelBench's 1e-4: the error is a function of the output;"
        f" {_errors(trial, found)}"
    )
    return Reason.OK


def check_formula(process: CandidateProcess) -> None:
    """An approximation that did all else right is refused for that alone."""
    if process.draft.approximation and process.config.correctness.formula == "require":
        raise Stop(Reason.APPROXIMATION, process.draft.approximation)


def check_repeatable(process: CandidateProcess) -> None:
    """The same inputs give the same bits, unless atomics or an operator of torch whose own bits
    vary had a part in it."""
    if not any(call.rerun_differs for call in process.calls):
        return
    source = process.candidate.code or ""
    varies = any(map(OPERATORS_MAY_DIFFER.match, process.draft.library_calls))
    if process.reference.bit_identical and not varies and not MAY_DIFFER.search(source):
        raise Stop(
            Reason.NON_DETERMINISTIC,
            "repeating the call on the same inputs gives other bits, and nothing in it uses"
            " atomics, reductions or locks",
        )
    process.draft.flags.append("not_bit_identical")


def compare_other_shapes(process: CandidateProcess) -> None:
    """Shapes and modes that the task accepts besides its own. An exception there is an honest
    refusal and becomes a flag; a silent wrong answer is a finding."""
    reference, flags = process.reference, process.draft.flags
    for trial in reference.trials:
        if trial.own_mode:
            continue
        shape = trial.outputs[0].shape if trial.outputs else ""
        detail = f"wrong on {trial.name} inputs of shape {shape}"
        try:
            outcome = accepted(trial, process.call(trial), process)
        except Stop as stop:
            outcome, detail = stop.finding.reason, stop.finding.detail
            if outcome is Reason.EXCEPTION and not process.child.dead:
                flag = "eval_mode_fails" if trial.evaluate else "declared_shape_only"
                flags += {flag}.difference(flags)
                continue
        if outcome is Reason.OK:
            continue
        broken = process.child.dead or outcome is Reason.CUDA_ERROR
        if trial.evaluate and not process.child.dead:
            flags.append("wrong_in_eval_mode")
        elif broken or process.config.correctness.shapes == "require":
            raise Stop(
                Reason.SHAPE_SPECIALISED,
                f"right for the declared shape only: {outcome} on {trial.name}: {detail}",
            )
        else:
            flags.append(Reason.SHAPE_SPECIALISED.value)


def compare_non_finite(process: CandidateProcess) -> None:
    """Flag a candidate that treats NaN or infinities otherwise than the reference: fmaxf(x, 0),
    which many honest kernels use, drops NaN."""
    reference = process.reference
    if (trial := reference.non_finite) and not process.child.dead:
        try:
            outcome = accepted(trial, process.call(trial), process)
        except Stop as stop:
            outcome = stop.finding.reason
        if outcome is not Reason.OK:
            process.draft.flags.append("non_finite_inputs_differ")


def explained(trial: Trial, outcome: Reason, found: Comparison, process: CandidateProcess) -> Stop:
    """The reason and one line for an output that is not the reference's, in the light of how it was
    obtained."""
    calls, wrong = process.calls, outcome is Reason.WRONG_OUTPUT
    if LATER in found.equals_trial:
        outcome, why = Reason.OUTPUT_ALIASED, "a later call overwrites an earlier output; "
    elif trial.weights_seed is not None and DECLARED in found.equals_trial:
        outcome, why = Reason.STALE_WEIGHTS, "right for the weights seen at construction only; "
    elif found.equals_trial:
        outcome = Reason.STALE_CACHE
        why = f"returns the answer of an earlier call ({found.equals_trial[0]}) for new inputs; "
    elif any(call.previous_changed for call in calls):
        outcome, why = Reason.OUTPUT_ALIASED, "a later call overwrites an earlier output; "
    elif any(call.rerun_differs for call in calls) and _error_varies(trial, found, process):
        outcome = Reason.NON_DETERMINISTIC
        why = "repeating the call on the same inputs gives another answer; "
    elif wrong and _ignores_inputs(trial, found, process):
        outcome, why = Reason.INPUT_INDEPENDENT, "gives the same answer for different inputs; "
    elif wrong and (name := _wrong_gradient(found, process)):
        outcome, why = Reason.WRONG_GRADIENT, f"the gradient of {name} is wrong; "
    elif outcome is Reason.NON_FINITE:
        why = (
            "NaN or infinity in other places than in the reference (an exp that overflows? with"
            " -ffast-math, compilers assume that nothing does); "
        )
    elif wrong and found.systematic:
        why = "another formula (an approximation?): the error is a function of the output; "
    elif wrong and trial.weights_seed is not None:
        why = (
            "right with the weights of the earlier calls (are some kept since then, or in another"
            " order than the reference's parameters of their shape?); "
        )
    else:
        why = ""
    return Stop(outcome, why + _errors(trial, found))


def _wrong_gradient(found: Comparison, process: CandidateProcess) -> str:
    """Of what the gradient is that differs most; empty where that is an output."""
    reference = process.reference
    names = reference.loaded.gradients.names if reference.loaded.gradients else []
    place = found.worst - len(reference.trials[0].outputs)
    return names[place] if names and place >= -len(names) and place < 0 else ""


def _errors(trial: Trial, found: Comparison) -> str:
    if found.unequal:
        return (
            f"{found.unequal} integers or truth values of an output are not the reference's on"
            f" {trial.name} inputs, and rounding does not explain them: round as it does"
            " (std::nearbyint for torch.round, std::floor for a floor division, truncation for a"
            " cast), and return among equal elements the one that it returns"
        )
    return (
        f"relative RMS error {found.rms:.2e}, worst element {found.max:.2e} on {trial.name} inputs"
    )


def _error_varies(trial: Trial, found: Comparison, process: CandidateProcess) -> bool:
    """Has the answer another error when it is asked for again? Where only the last bits differ (a
    convolution's of torch, say), they do not explain a wrong answer."""
    if trial not in process.reference.trials:
        return False  # its inputs are gone
    try:
        again = process.call(trial)
    except Stop:
        return True
    return abs(again.rms - found.rms) > 1e-3 * found.rms


def _ignores_inputs(trial: Trial, found: Comparison, process: CandidateProcess) -> bool:
    if found.equals_answer:
        return True
    others = [
        other
        for other in process.reference.trials
        if other.shape == DECLARED and other.weights_seed is None and other is not trial
    ]
    if trial.name != DECLARED or not others:
        return False
    try:
        return DECLARED in process.call(others[0]).equals_answer
    except Stop:
        return False


def _other_weights(trial: Trial, process: CandidateProcess) -> Trial:
    """The trial that shows whether the candidate uses its weights as they are now, however it keeps
    them."""
    reference, shapes = process.reference, process.reference.loaded.parameters
    missing, spare = unmatched_shapes(shapes, process.loaded.parameters)
    wanted = [shapes[index] for index in missing]
    if not missing or not reference.weights_matter(missing):
        wanted = []
    statistics = reference.used_statistics()
    held = [shape for shape in process.loaded.statistics if shape in statistics]
    if sorted(held) != sorted(statistics):
        wanted += statistics
        spare += sum(map(math.prod, process.loaded.statistics))
    if not wanted:
        return trial
    if spare < sum(map(math.prod, wanted)):
        raise Stop(
            Reason.STALE_WEIGHTS,
            f"keeps what the reference has of shape {wanted[:4]}, which changes its output, in no"
            " nn.Parameter (for running statistics: or buffer) that could be given new values"
            " (one that was added to another at construction is kept in none)",
        )
    # packed, perhaps: other weights are then made by constructing both anew
    process.draft.flags.append("weights_not_mappable")
    return reference.constructed_otherwise()


def _with_transposed(trial: Trial, found: Comparison, process: CandidateProcess) -> Comparison:
    """The comparison with square matrices transposed where that is right, else the one that was
    found: the shape of such a matrix does not tell how a candidate keeps it."""
    if not any(len(shape) == 2 and shape[0] == shape[1] for shape in process.loaded.parameters):
        return found
    again = process.call(trial, transposed=True)
    return again if process.reference.judge(again, trial) is Reason.OK else found


def _correctness(
    measured: list[tuple[Trial, Comparison]], reference: ReferenceProcess
) -> Correctness:
    """The worst over all trials but those on hard inputs; KernelBench's tolerances over the trials
    on the task's own inputs, which is where they belong."""
    worst = merge([found for trial, found in measured if not trial.hard])
    own = merge([found for trial, found in measured if trial.own_inputs])
    return Correctness(
        trials=len(measured),
        rms_error=worst.rms,
        reference_rms_error=worst.reference_rms,
        max_error=worst.max,
        kernelbench_1e4=own.kernelbench_1e4,
        kernelbench_1e2=own.kernelbench_1e2,
        oracle=reference.oracle,
    )


IDLE_S = 0.02
LONGEST_IDLE_S = 1.0
IDLE_SHARE = 0.5


def attribute_work(process: CandidateProcess, *, again: bool = False) -> None:
    """Which kernels and which library operators ran, and the kernels' share of the time. `again`:
    where it was timed, add what shows now, for a candidate may work otherwise since."""
    draft = process.draft
    if again and not draft.timing:
        return
    inputs, descriptor = process.unseen_inputs()
    seen = process.ask(NameOperators(inputs=inputs, again=again), (descriptor,))
    draft.custom_kernels = tuple(one_line(name)[:200] for name in seen.custom[:32])
    linked, flags = library_work(process.libraries.values())
    named = {one_line(name)[:200] for name in (*seen.operators[:64], *linked)}
    draft.library_calls = tuple(sorted(named.union(draft.library_calls))[:64])
    if seen.off_stream:
        flags.add("side_stream")  # joined before the return, or `check_idle` says so
    draft.flags += sorted(flags.difference(draft.flags))
    idle = sum(not call.custom_calls for call in process.calls)
    calls = "backward passes" if process.reference.loaded.gradients else "calls"
    if idle:
        raise _no_custom_kernel(
            f"no custom kernel ran in {idle} of {len(process.calls)} {calls}; the work was done by",
            process,
            "no operator at all",
        )
    inputs, descriptor = process.unseen_inputs()
    share = process.ask(MeasureShare(inputs=inputs), (descriptor,)).share
    least = 1.0 if draft.custom_kernel_time_share is None else draft.custom_kernel_time_share
    draft.custom_kernel_time_share = min(least, max(0.0, share))


def check_idle(process: CandidateProcess) -> None:
    """Nothing left running, and nothing left changed."""
    if all(_busy_share(process.child) > IDLE_SHARE for _ in range(2)):
        what = "the process continues to compute after its call has returned"
        raise Stop(Reason.BACKGROUND_WORK, what)
    outstanding = sorted(call.outstanding_share for call in process.calls)
    if outstanding and outstanding[len(outstanding) // 2] > 0.3:
        what = "work continues on another stream after the current stream has finished"
        raise Stop(Reason.STREAM_ESCAPE, what)
    check_state(process)


def check_state(process: CandidateProcess) -> None:
    """No setting of torch or CUDA changed that honest code leaves alone."""
    changed = process.ask(ReadState()).changed
    for name, reason in REASON_OF_CHANGE.items():
        if name in changed:
            was = one_line(changed[name])[:200]
            raise Stop(reason, f"changes {name}: {was}; {FIX_OF_CHANGE[name]}")
    process.draft.flags += [f"changes:{one_line(name)[:40]}" for name in changed]


def check_ornamental(process: CandidateProcess) -> None:
    """Do the kernels matter? Asked last, since corrupted values may lead a kernel astray: a crash
    shows that they were used."""
    drawn = [
        trial.distribution
        for trial in process.reference.trials
        if trial.own_mode and trial.weights_seed is None
    ]
    for distribution in dict.fromkeys(drawn):
        try:
            inputs, descriptor = process.unseen_inputs(2, distribution)
            found = process.ask(ReplaceWritten(inputs=inputs), (descriptor,)).ornamental
        except Stop:
            return
        if found:
            raise _no_custom_kernel(
                "the output does not depend on what the custom kernels write; the work is done by",
                process,
                "other code",
            )
        if found is not None:
            return


def _no_custom_kernel(what: str, process: CandidateProcess, otherwise: str) -> Stop:
    calls = ", ".join(process.draft.library_calls[:6]) or otherwise
    return Stop(Reason.NO_CUSTOM_KERNEL, f"{what} {calls}")


def _busy_share(child: Child) -> float:
    """Share of a short window in which a child that was asked nothing used a processor. 0 where the
    kernel does not tell."""
    # on a busy machine a process that wants to run does not always get a processor
    started, used = time.monotonic(), child.demand_ns()
    if not used:
        return 0.0
    while True:
        time.sleep(IDLE_S)  # the window that is measured, not a wait for something
        passed = time.monotonic() - started
        share = (child.demand_ns() - used) / 1e9 / passed
        # The kernel counts a wait for the processor when it ends: on a busy machine more is to
        # come.
        if share > IDLE_SHARE or passed > LONGEST_IDLE_S or not _wants_to_run(child):
            return share


def _wants_to_run(child: Child) -> bool:
    """Does any thread of this process and its descendants run, or wait for a processor?"""
    for stat in child.thread_files("stat"):
        with suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[:1] == ["R"]:
                return True
    return False
