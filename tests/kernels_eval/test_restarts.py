"""A reference that breaks its own process on inputs that it does not take: what was asked for is
left out, and the verdict is what it is without."""

from types import SimpleNamespace

import pytest

from kernels_eval.judge.messages import Stop
from kernels_eval.judge.reference_handle import ReferenceProcess, ReferenceRestarted
from kernels_eval.judge.trial import Trial
from kernels_eval.judge.trials import TRIALS
from kernels_eval.protocol import (
    OTHER_INPUTS,
    OTHER_ROUNDING,
    Compare,
    EstimateUsedBytes,
    FindDecisive,
    RunUnseen,
)
from kernels_eval.records import Reason
from kernels_eval.sandbox.child import ChildFailure
from tests.support.kernels import AFFINE, QUICK, assert_reason, kernel_task, module, task_source

DEVICE = """
import os
from kernels_eval.model.model_runner import ModelRunner
faults = []
def synchronise(*_):
    if faults:
        raise RuntimeError("CUDA error: device-side assert triggered")
ModelRunner.synchronise = synchronise
def picked(pool, places):
    \"\"\"As on a GPU: a number out of range ends the context, which later calls find out.\"\"\"
    synchronise()
    if pool.numpy().max() < 500:  # which no operator tells
        return pool[places]
    {fault}
    return torch.zeros(places.shape + pool.shape[1:])
"""
PAGES = task_source(
    "return picked(pool, table.long()).reshape(len(table), 16) * 2.0 + 1.0",
    arguments="pool, table",
    inputs="[torch.randn(40, 16), torch.randperm(40)[:32].int()]",
)
ANSWER = "return ext.affine(pool[table.long()])"


@pytest.mark.parametrize(
    "fault", [pytest.param("faults.append(places)", marks=pytest.mark.slow), "os.abort()"]
)
def test_what_breaks_the_reference_is_left_out(verify, fault):
    """Large numbers: they are refused, too, but late."""
    task = kernel_task(PAGES + DEVICE.format(fault=fault), "pages")
    for forward, reason in ((ANSWER, "ok"), (f"{ANSWER} + 0.5", "wrong_output")):
        code = module(forward, arguments="pool, table")
        assert_reason(verify(task, code, timed=False), reason, timed=False)
    reference = verify.runner._reference
    assert reference.unsuitable and "normal" in {trial.name for trial in reference.trials}


def test_a_task_that_breaks_on_its_own_inputs_is_a_task_error(verify):
    forward = "pages = picked(x, torch.tensor([99]))\nreturn x * 2.0"
    task = kernel_task(task_source(forward) + DEVICE.format(fault="faults.append(1)"), "broken")
    verdict = verify(task, module("return ext.affine(x)"), timed=False)
    assert_reason(verdict, "reference_failed", timed=False)


# -- what is left out, by a process that answers by script -----------------------------------------

CRASHED = ChildFailure(Reason.CRASHED, "the process was killed by SIGABRT")
LATE = ChildFailure(Reason.RUN, "no answer within 120 s")
CUDA, REFUSED = "CUDA error: device-side assert triggered", "ValueError: no such labels"


class Child:
    """Answers each request with this error, or dies of it."""

    def __init__(self, error):
        self.error, self.dead, self.owed = error, None, ""
        self.channel = SimpleNamespace(accepts_descriptors=False)
        self.log_tail, self.close = lambda _: "", lambda: None
        self.write_file = lambda name, text: name
        self.begun = []

    def begin(self, message):
        self.begun.append(message)

    def finish(self, *_):
        if isinstance(self.error, str):
            return {"error": "exception", "detail": self.error}
        self.dead = self.error
        raise self.error

    request = finish


@pytest.fixture
def broken():
    def made(error):
        reference = ReferenceProcess(lambda: Child(error), AFFINE, QUICK, "cpu")
        trials = [
            Trial("declared", TRIALS[0], 1),
            Trial("impulse", TRIALS[0], 2, distribution="impulse"),
            Trial("each_1", TRIALS[0], 3, distribution="impulse", shape="each_1"),
        ]
        reference.expected = SimpleNamespace(task=SimpleNamespace(trials=trials))
        return reference

    return made


UNSEEN = RunUnseen(inputs={"packed": [], "count": 0, "stride": 0}, into="own")


def search(reference):
    return reference.answer_if_suitable(FindDecisive(trials=[], seed=1, domain=""))


def estimate(reference):
    return reference.answer_if_suitable(EstimateUsedBytes(seed=1), "bytes")


def compare(reference):
    return reference.request(Compare(trial="declared"))


def draws(*distributions):
    def run(reference):
        with reference.trying_draws(distributions):
            return reference.request_unread(UNSEEN)

    return run


@pytest.mark.parametrize(
    "error, ask, left",
    [
        (CUDA, search, {"FindDecisive"}),
        (CRASHED, search, {"FindDecisive"}),
        (REFUSED, search, set()),
        (CUDA, estimate, {"bytes"}),
        (CUDA, compare, {OTHER_ROUNDING}),
        (REFUSED, compare, None),
        (LATE, search, None),
        ("out of memory: CUDA error: out of memory", compare, None),
        (CUDA, draws("declared"), {OTHER_ROUNDING}),
        (CUDA, draws("declared", "moved"), {"moved"}),
        # a trial's distribution has that trial's name, not that of another shape
        (REFUSED, draws("moved", "impulse"), {"moved", "impulse"}),
        (REFUSED, draws("declared"), None),
        ("out of memory", draws("moved"), None),
    ],
)
def test_a_request_that_breaks_the_process_says_what_is_left_out(broken, error, ask, left):
    """None: it fails, and nothing is begun again."""
    reference = broken(error)
    first = reference.child
    if left:
        with pytest.raises(ReferenceRestarted):
            ask(reference)
        assert reference.unsuitable == left and reference.child is not first
        assert set(reference._load_request.left_out) == left
    elif left is None:
        with pytest.raises(Stop):
            ask(reference)
        assert not reference.unsuitable and reference.child is first
    else:
        assert ask(reference) is None and not reference.unsuitable


def test_what_was_left_out_is_not_asked_again(broken):
    reference = broken(CUDA)
    reference.unsuitable = {"FindDecisive", OTHER_ROUNDING}
    assert search(reference) is None
    with pytest.raises(Stop):
        compare(reference)


def test_a_load_that_breaks_the_process_is_made_once_more_on_own_inputs(broken):
    reference = broken(CUDA)
    first = reference.child
    with pytest.raises(Stop):
        reference.load()
    asked = [*first.begun, *reference.child.begun]
    assert [message["left_out"] for message in asked] == [[], [OTHER_INPUTS]]
