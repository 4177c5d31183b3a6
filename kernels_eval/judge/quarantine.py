"""Tasks that cannot tell right from wrong: an answer that ignores the inputs would pass, or all
inputs have one answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kernels_eval.config import NARROWED_SHARE
from kernels_eval.judge.conditions import has_one_answer, one_answer
from kernels_eval.judge.gates import TaskGates
from kernels_eval.judge.messages import Stop
from kernels_eval.judge.trial import Stage, TaskFindings, Trial
from kernels_eval.judge.trials import HARD_TRIALS
from kernels_eval.protocol import DECLARED, NON_FINITE, Expectation
from kernels_eval.records import Reason

CONSTANTS = ("zeros", "one draw's answer", "one draw's mean")
"""Answers that ignore the inputs (`Expectation.constants`), the last one over the batch."""
ZEROS, MEAN = 0, 2
"""Their positions."""
PASSING = (Reason.OK, Reason.APPROXIMATION)
"""What is right, or may be by `correctness.formula`."""


def degenerate(detail: str) -> Stop:
    return Stop(Reason.DEGENERATE_TASK, detail)


def quarantine_degenerate(
    task: TaskFindings, gates: TaskGates, ignored: Callable[[], list[str]]
) -> list[str]:
    """Flags of what a task does not tell, `ignored` arguments among them. Narrows `gates` that an
    answer which ignores the inputs would pass. Raises Stop (DEGENERATE_TASK) for a task that cannot
    tell right from wrong.
    """
    expected = task.expected
    _raise_for_shapes(task.trials)
    if task.inputs_vary and len(expected) > 2 and one_answer(expected.values()):
        raise degenerate(
            f"the reference's output is the same for all inputs ({len(expected)} draws, one answer)"
        )
    flags = _narrow_gates(task, gates) + ignored()
    if constant_passes({DECLARED: expected[DECLARED]}, gates):
        # its own inputs and weights tell nothing; other ones do
        flags.append("zeros_pass_declared")
    if task.own_answer_is_fixed:
        flags.append("own_answers_never_vary")
    if has_one_answer(task):
        flags.append("answers_never_vary")
    return flags


def few_trials(task: TaskFindings) -> bool:
    """Whether a candidate is compared on the task's own inputs alone, which it could answer by what
    these have in common."""
    others = (
        trial
        for trial in task.trials
        if trial.row.stage is Stage.OUTPUTS and trial.distribution not in (DECLARED, NON_FINITE)
    )
    return bool(task.loaded.plan.notes) and not has_one_answer(task) and not any(others)


def constant_passes(
    expected: Mapping[str, Expectation], gates: TaskGates, constant: int = 0
) -> bool:
    """Whether this answer that ignores the inputs (one of CONSTANTS) passes in all these trials."""
    return all(
        gates.judge(seen.constants[constant], hard=name in HARD_TRIALS) in PASSING
        for name, seen in expected.items()
    )


def _raise_for_shapes(trials: list[Trial]) -> None:
    told = [trial for trial in trials if trial.row.required]
    shapes = [[output.shape for output in trial.outputs] for trial in told]
    other = next((each for each in shapes if each != shapes[0]), None)
    if other:
        raise degenerate(
            "the shapes of the reference's outputs depend on the values of its inputs:"
            f" {shapes[0]}, and {other} for other inputs"
        )


def _narrow_gates(task: TaskFindings, gates: TaskGates) -> list[str]:
    """Narrow gates to a quarter of a passing constant's error. Raises Stop (DEGENERATE_TASK)."""
    own = {name: seen for name, seen in task.expected.items() if name != "other_weights"}
    flags = []
    for index, constant in enumerate(CONSTANTS):
        if index and one_answer(own.values()):
            break  # `own_answers_never_vary`
        if not constant_passes(own, gates, index):
            continue
        tame = [seen.constants[index] for name, seen in own.items() if name not in HARD_TRIALS]
        worst = max(tame, key=lambda error: error.rms)
        gates.loosest = min(gates.loosest, NARROWED_SHARE * worst.rms)
        if constant_passes(task.expected, gates, index):
            raise degenerate(
                f"an output of {constant} would pass: relative RMS error {worst.rms:.2e}, the"
                f" reference's own {worst.reference_rms:.2e}"
            )
        if index and constant_passes(own, gates, index):
            flags.append("constant_passes_own_weights")
    return flags
