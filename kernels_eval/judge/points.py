"""Is a candidate right near its task, too, at points that no trial names? Inputs and weights are
changed at random under secret seeds, so that what an approximation takes for granted does not hold
at some of them, and no look at this source tells at which.

A wrong answer is one whose error is many times what its gate allows, on two draws of inputs, where
the reference amplifies no rounding, and much the same where inputs move a little, as rounding never
is. What is little beyond a gate is not: the worst of many points is bad for some honest kernels.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, replace

from kernels_eval.config import (
    EXPLORED_POINTS,
    EXPLORED_S,
    FEWEST_EXPLORED,
    MOST_STEPS,
    SAME_ERROR,
    SEEN_RMS,
)
from kernels_eval.judge.candidate_handle import CandidateProcess
from kernels_eval.judge.conditions import iterates
from kernels_eval.judge.explanation import EXPLANATIONS, errors_of, loose_math
from kernels_eval.judge.messages import Stop
from kernels_eval.judge.trial import Trial, TrialRow
from kernels_eval.protocol import (
    CHANGED,
    DECLARED,
    FEW,
    GELU_BY_TANH,
    MOVED,
    MUTATED,
    WITHIN,
    Comparison,
    ForgetTrial,
    GlanceAt,
    LikenError,
    OutputForm,
)
from kernels_eval.records import Reason

EXPLORED = TrialRow("explored", explored=True)


@dataclass(frozen=True)
class Point:
    """A point near the task: seeds of what changes weights, drawn by the `base` one in their form
    (none: as constructed), and inputs, one after the other."""

    base: int
    form: str
    domain: str
    weights: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    places: str = ""
    """`FEW` where inputs change at few places, empty where at many"""

    def farther(self, weights: int, inputs: int) -> Point:
        """By so many changes."""
        more, others = ([secrets.randbits(31) for _ in range(n)] for n in (weights, inputs))
        return replace(self, weights=(*self.weights, *more), inputs=(*self.inputs, *others))

    @property
    def trial(self) -> Trial:
        """On a new draw of inputs."""
        name = "_".join([MUTATED, *(f"{seed}{self.places}" for seed in self.inputs)])
        return Trial(
            EXPLORED.name,
            EXPLORED,
            secrets.randbits(31),
            distribution=f"{name}{self.domain}" if self.inputs else DECLARED,
            weights="_".join([f"{self.form}{CHANGED}", *map(str, self.weights)])
            if self.form
            else "",
            weights_seed=self.base,
        )


def explore(process: CandidateProcess) -> None:
    """Compare at points near the task: every other one at random, the others a step from the one
    with the largest error; at none where another formula was seen already. Raises Stop for a wrong
    answer.
    """
    reference, spent = process.reference, 0
    left_out = EXPLORED.name in reference.unsuitable or process.draft.approximation
    points = 0 if left_out else EXPLORED_POINTS
    best, largest = None, SEEN_RMS
    for number in range(points):
        if number >= FEWEST_EXPLORED and spent > EXPLORED_S * 1e9:
            break
        point = _next(best if number % 2 else None, process)
        if point is None:
            break
        began = _worked_ns(process)
        found = _glanced_at(point.trial, process)
        spent += _worked_ns(process) - began
        if found is None:
            continue
        if found.rms > largest:
            best, largest = point, found.rms
        if reference.gates.judge(found, far=True) is Reason.OK:
            continue
        trial = point.trial
        found = _far_off(trial, process)
        if found and _stays(trial, process) and _far_off(point.trial, process):
            raise _wrong(point, found, process)
    process.rebuild()
    reference.request(ForgetTrial(trial=EXPLORED.name))


def _next(best: Point | None, process: CandidateProcess) -> Point | None:
    """A point, or a step from the best one; None where nothing can be changed."""
    task, other = process.reference.expected.task, process.reference.timed_weights
    mapped = other is not None and "weights_not_mappable" not in process.draft.flags
    ways = [(mapped, MOST_STEPS), (bool(task.loaded.plan.notes), MOST_STEPS // 2)]
    if not any(way for way, _ in ways):
        return None
    if best:
        weights = ways[0][0] and (not ways[1][0] or bool(secrets.randbits(1)))
        return best.farther(int(weights), int(not weights))
    form = other.weights if other and mapped else ""
    domain, places = secrets.choice((task.domains[0], WITHIN)), secrets.choice(("", FEW))
    new = Point(secrets.randbits(31), form, domain, places=places)
    least = int(not all(way for way, _ in ways))
    return new.farther(*(way and secrets.choice(range(least, most + 1)) for way, most in ways))


def _worked_ns(process: CandidateProcess) -> int:
    return process.child.processor_ns() + process.reference.child.processor_ns()


def _glanced_at(trial: Trial, process: CandidateProcess) -> Comparison | None:
    """The errors of an answer, beside the reference's on its own inputs."""
    reference = process.reference
    seen = reference.answer_if_suitable(GlanceAt(trial=trial.expect()), EXPLORED.name)
    if seen is None or not seen.finite or seen.outputs != reference.trials[0].outputs:
        return None
    trial.outputs = seen.outputs
    return _compared(trial, process)


def _far_off(trial: Trial, process: CandidateProcess) -> Comparison | None:
    """The errors of an answer that is far beyond its gates, where these can be told."""
    reference = process.reference
    seen = reference.answer_if_suitable(trial.expect(), EXPLORED.name)
    if seen is None or not trial.suits(seen, reference.expected.task.expected[DECLARED]):
        return None
    trial.outputs = seen.outputs
    found = _compared(trial, process)
    if found is None or not found.masks_match or _few_differ(found, trial.outputs):
        return None
    wrong = reference.judge(found, trial) not in (Reason.OK, Reason.APPROXIMATION)
    far = reference.gates.judge(found, far=True) is not Reason.OK
    return found if wrong and far else None


def _stays(trial: Trial, process: CandidateProcess) -> bool:
    """Whether an error is much the same where inputs are a little smaller, twice. What cancels, as
    in a variance in one pass, rounds otherwise there; what is left out stays."""
    reference, asked = process.reference, LikenError(trial=trial.name)
    reference.request(asked)
    changes = trial.distribution.removeprefix(MUTATED) if trial.distribution != DECLARED else ""
    return all(
        _far_off(replace(trial, distribution=f"{MUTATED}_{MOVED}{number}{changes}"), process)
        and reference.request(asked).distance < SAME_ERROR
        for number in range(2)
    )


def _compared(trial: Trial, process: CandidateProcess) -> Comparison | None:
    """None where a candidate raises: there may be no such inputs for it."""
    try:
        return process.call(trial, transposed=process.transposed)
    except Stop:
        if process.child.dead:
            raise
        return None


def _few_differ(found: Comparison, outputs: list[OutputForm]) -> bool:
    return 0 < found.unequal < sum(math.prod(x.shape) for x in outputs) / 16


def _wrong(point: Point, found: Comparison, process: CandidateProcess) -> Stop:
    what = "weights" * bool(point.weights), "inputs" * bool(point.inputs)
    by = process.reference.explain(EXPLORED.name).by
    fewer = "make fewer steps, iterations or terms than the task, or "
    fewer = fewer if iterates(process.reference.expected.task) else ""
    left_out = loose_math(found, process) or f"does it {fewer}leave out what others seldom need?; "
    # not a downcast, which the trials would have shown
    why = EXPLANATIONS[by][1] if by == GELU_BY_TANH else left_out
    where = f"wrong where {' and '.join(filter(None, what))} are changed at random, twice"
    detail = f"right in all trials, {where}: {why}{errors_of(point.trial, found)}"
    return Stop(Reason.WRONG_OUTPUT, detail)
