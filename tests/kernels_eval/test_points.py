"""Points near a task, on a reference and a candidate that answer by script."""

import re
from types import SimpleNamespace

import pytest

from kernels_eval.config import EXPLORED_POINTS, EvalConfig
from kernels_eval.judge import points
from kernels_eval.judge.gates import TaskGates
from kernels_eval.judge.messages import Stop
from kernels_eval.judge.reference_handle import ReferenceProcess
from kernels_eval.protocol import (
    GELU_BY_TANH,
    Comparison,
    Done,
    Expectation,
    Explained,
    Glimpse,
    Likeness,
    OutputForm,
)
from kernels_eval.records import Reason

FORM = OutputForm(shape=[64], dtype="float32", bytes=256)


def expectation(own):
    return Expectation(
        finite_share=1.0,
        reference_rms=own,
        sequential_rms=0.0,
        deterministic=True,
        bit_identical=True,
        oracle="float64",
        equals=[],
        constants=[],
        outputs=[FORM],
    )


class Process:
    """A candidate with these errors, the reference's own being `own` at points, and what it was
    asked."""

    def __init__(
        self, errors, own=1e-7, refuses=False, mapped=True, inputs=True, by="", changed=0.1
    ):
        self.errors, self.own, self.refuses, self.asked = errors, own, refuses, []
        self.by, self.changed = by, changed
        self.known = 1e-7
        self.transposed, self.rebuilt, self.compiler_flags = False, 0, []
        self.config = EvalConfig()
        self.child = SimpleNamespace(dead=False, processor_ns=lambda: 0)
        flags = [] if mapped else ["weights_not_mappable"]
        self.draft = SimpleNamespace(flags=flags, approximation="")
        task = SimpleNamespace(
            domains=("",),
            expected={"declared": expectation(1e-7)},
            loaded=SimpleNamespace(
                plan=SimpleNamespace(notes=["x"] if inputs else []), parameters=[], depth=0
            ),
        )
        self.reference = SimpleNamespace(
            child=self.child,
            unsuitable=set(),
            timed_weights=SimpleNamespace(weights="signed"),
            expected=SimpleNamespace(task=task),
            trials=[SimpleNamespace(outputs=[FORM])],
            gates=TaskGates(),
            request=self.request,
            explain=lambda trial: Explained(by=self.by),
            answer_if_suitable=self.answer_if_suitable,
        )
        self.reference.judge = lambda *given: ReferenceProcess.judge(self.reference, *given)

    def answer_if_suitable(self, request, name):
        assert name == "explored"
        return None if self.refuses else self.request(request)

    def request(self, request):
        if request.command == "ForgetTrial":
            return Done()
        if request.command == "LikenError":
            return Likeness(distance=self.changed)
        if request.command == "GlanceAt":
            self.known = 1e-7
            return Glimpse(finite=True, outputs=[FORM])
        self.known = self.own
        return expectation(self.own)

    def call(self, trial, transposed):
        self.asked.append(trial)
        rms = self.errors[len(self.asked) % len(self.errors)]
        if rms is None:
            raise Stop(Reason.EXCEPTION, "no such inputs")
        return Comparison(rms=rms, max=rms, reference_rms=self.known, precision="fp32")

    def rebuild(self):
        self.rebuilt += 1


def test_an_error_far_beyond_the_gate_on_three_draws_is_wrong():
    process = Process([1e-3])
    with pytest.raises(Stop) as stop:
        points.explore(process)
    assert stop.value.finding.reason is Reason.WRONG_OUTPUT
    assert "changed at random" in stop.value.finding.detail
    glance, first, moved, otherwise, again = process.asked
    assert first.seed == moved.seed == otherwise.seed
    assert len({glance.seed, first.seed, again.seed}) == 3
    assert "moved0" in moved.distribution and "moved1" in otherwise.distribution
    assert len({trial.weights for trial in process.asked}) == 1
    assert glance.distribution == first.distribution == again.distribution


@pytest.mark.parametrize("by, said", [(GELU_BY_TANH, GELU_BY_TANH), ("TF32", "leave out")])
def test_what_explains_an_error_at_a_point_is_named_unless_trials_would_show_it(by, said):
    with pytest.raises(Stop) as stop:
        points.explore(Process([1e-3], by=by))
    finding = stop.value.finding
    assert finding.reason is Reason.WRONG_OUTPUT and said in finding.detail


@pytest.mark.parametrize(
    "errors, own",
    [([4e-6], 1e-7), ([1e-3, 1e-7, 1e-7], 1e-7), ([1e-3], 1e-4), ([None], 1e-7)],
    ids=["little_beyond", "on_one_draw", "rounding_is_amplified", "it_raises"],
)
def test_what_may_be_rounding_chance_or_no_input_of_the_task_is_not(errors, own):
    process = Process(errors, own)
    points.explore(process)
    assert len(process.asked) >= EXPLORED_POINTS and process.rebuilt == 1


def test_nothing_is_looked_for_in_another_formula():
    process = Process([1e-3])
    process.draft.approximation = "another formula"
    points.explore(process)
    assert not process.asked


def test_an_error_that_is_another_one_where_inputs_move_is_rounding():
    process = Process([1e-3], changed=0.9)
    points.explore(process)
    assert process.rebuilt == 1


def test_points_start_from_the_one_with_the_largest_error():
    process = Process([4e-6])
    points.explore(process)
    first, second = process.asked[:2]
    assert second.weights_seed == first.weights_seed
    assert second.weights.startswith(first.weights)
    assert (second.weights, second.distribution) != (first.weights, first.distribution)


def test_nothing_is_asked_where_nothing_can_change():
    process = Process([1e-3], mapped=False, inputs=False)
    points.explore(process)
    assert not process.asked


def test_packed_weights_stay():
    process = Process([4e-6], mapped=False)
    points.explore(process)
    assert {trial.weights for trial in process.asked} == {""}


def test_what_the_task_refuses_is_no_point():
    process = Process([1e-3], refuses=True)
    points.explore(process)
    assert not process.asked and process.rebuilt == 1


def test_inputs_change_at_many_places_or_at_few():
    asked = []
    for _ in range(3):
        process = Process([1e-7], mapped=False)
        points.explore(process)
        asked += [trial.distribution for trial in process.asked]
    few = [name for name in asked if "_few" in name]
    assert 0 < len(few) < len(asked)
    assert all(re.fullmatch(r"mutated(_\d+_few)+(_within)?", name) for name in few)
