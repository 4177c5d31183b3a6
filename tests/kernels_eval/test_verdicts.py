"""What a verdict holds, deadlines, and the order in which a candidate is asked things. Verdicts of
every kind are in tests/data/verdicts."""

import uuid

import pytest

from kernels_eval.config import MOST_BUILDS, BuildConfig
from kernels_eval.judge.candidate_handle import CandidateProcess, MadeElsewhere
from kernels_eval.protocol import CaptureConstructor, Expect, LoadCandidate
from kernels_eval.records import Reason, Status
from kernels_eval.sandbox.child import Child
from kernels_eval.source.spec import Build
from tests.support import kernels
from tests.support.kernels import (
    AFFINE,
    QUICK,
    WEIGHTED,
    assert_reason,
    kernel_task,
    load_inline,
    module,
    task_source,
    verifying,
)
from tests.support.waiting import until

GAIN = module(
    "return ext.times_row(x, self.gain)", init="self.gain = nn.Parameter(torch.randn(64))"
)


def calls(function):
    return module(f"return ext.{function}(x)")


# -- correct ---------------------------------------------------------------------------------------


def test_a_correct_kernel_is_timed_and_named(verify):
    verdict = verify(AFFINE, calls("affine"))
    assert_reason(verdict, "ok")
    assert verdict.status is Status.CORRECT and verdict.correct_any and verdict.correct_custom
    assert verdict.timing is not None and verdict.timing.pairs >= 4
    assert verdict.timing.speedup_lower <= verdict.timing.speedup <= verdict.timing.speedup_upper
    assert verdict.timing.candidate_ms >= 0.8 * verdict.timing.clock_bound_ms
    assert (
        verdict.correctness is not None
        and verdict.correctness.oracle == "float64"
        and verdict.correctness.trials == 13
    )
    assert verdict.custom_kernels == ("affine",)
    assert verdict.outputs_match and verdict.build_tier == "lite" and verdict.device == "cpu"
    assert verdict.phases is not None
    phases = verdict.phases.model_dump()
    assert (
        min(phases[name] for name in ("load_s", "correctness_s", "attribution_s", "timing_s")) > 0
    )
    assert 0 < sum(phases.values()) <= verdict.run_s


def test_a_correct_kernel_with_weights_is_right_for_other_weights_too(verify):
    verdict = verify(WEIGHTED, GAIN)
    assert_reason(verdict, "ok")
    assert verdict.correctness is not None and verdict.correctness.trials == 17
    assert "weights_not_mappable" not in verdict.flags


# -- deadlines -------------------------------------------------------------------------------------


def test_a_compile_that_does_not_end():
    """Instantiations without end: a new source each time, for a deadline is not remembered but a
    success would be."""
    bomb = (
        f"// {uuid.uuid4()}\ntemplate <int N, int M> struct Bomb {{ static constexpr int value ="
        " Bomb<N - 1, 2 * M>::value + Bomb<N - 1, 2 * M + 1>::value; };\ntemplate <int M> struct"
        " Bomb<0, M> { static constexpr int value = M; };\ntorch::Tensor affine(torch::Tensor x)"
        " { return x * (Bomb<24, 0>::value % 3); }\n"
    )
    extension = load_inline(bomb, name="bomb_ext")
    config = QUICK.model_copy(update={"build": BuildConfig(timeout_s=1.0)})
    with verifying(config) as impatient:
        verdict = impatient(AFFINE, module("return ext.affine(x)", extension=extension))
    assert_reason(verdict, "build")
    assert verdict.status is Status.TIMEOUT and verdict.build_s < 300, (
        "the compiler was stopped, not waited for"
    )


@pytest.fixture(scope="module")
def hasty():
    """Waits 2 s for what is expected never to come; a call, which others come before, is waited for
    longer."""
    limits = QUICK.limits.model_copy(update={"run_s": 10, "load_s": 2})
    config = QUICK.model_copy(update={"limits": limits, "build": BuildConfig(capture_timeout_s=2)})
    with verifying(config) as made:
        yield made


@pytest.mark.parametrize("where", [pytest.param("before", marks=pytest.mark.slow), "init"])
def test_an_import_or_a_constructor_that_does_not_end(hasty, where):
    code = module("return ext.affine(x)", **{where: "while True:\n    pass"})
    assert_reason(hasty(AFFINE, code), "load")


# -- no code, and tasks that cannot be used --------------------------------------------------------


@pytest.mark.parametrize("reason", ["no_code_block", "truncated", "missing_model_new"])
def test_a_response_without_a_module(verify, reason):
    assert_reason(verify(AFFINE, None, parse_reason=reason), reason)


# -- honest twins: each looks like something above, and is correct ---------------------------------

LATE = module("return self.ext.affine(x)", extension="None", init=f"self.ext = {load_inline()}")


def test_what_a_constructor_asks_for_is_built_before_the_device_is_held(verify):
    made = kernels.candidate(AFFINE, LATE)
    ahead, late = verify.preparer.prepare(made, AFFINE), verify.preparer.prepare(made)
    assert ahead.libraries and not late.libraries
    for prepared in (ahead, late):
        assert_reason(verify.evaluator.run(AFFINE, made, prepared), "ok")


LATER = """
if self.ext is None:
    self.ext = {}
return self.ext.affine(x)
""".strip()
"""Asks for its library in its first call, which no build worker sees."""


def test_a_build_that_a_call_asks_for_is_made_while_nothing_runs(verify, monkeypatch):
    code = module(
        LATER.format(load_inline(name=f"late_{uuid.uuid4().hex}")),
        extension="None",
        init="self.ext = None",
    )
    made = kernels.candidate(AFFINE, code)
    given, alive, build = [], set(), verify.runner.builder._compiled
    request, close = Child.request, Child.close

    def heard(self, question, *rest):
        if isinstance(question, LoadCandidate):
            given.append(question.libraries)
            alive.add(self)
        return request(self, question, *rest)

    def closed(self):
        close(self)
        alive.discard(self)

    def compiled(*asked):
        assert not alive, "the device waits for no compiler"
        return build(*asked)

    monkeypatch.setattr(Child, "request", heard)
    monkeypatch.setattr(Child, "close", closed)
    monkeypatch.setattr(verify.runner.builder, "_compiled", compiled)
    prepared = verify.preparer.prepare(made, AFFINE)
    needed = verify.evaluator.run_once(AFFINE, made, prepared)
    assert needed.asked and needed.run_s > 0
    until(lambda: not alive)  # it is ended in the background
    again = verify.preparer.add_build(made, needed)
    assert not again.asked and again.seconds > prepared.seconds
    verdict = verify.evaluator.run_once(AFFINE, made, again)
    assert_reason(verdict, "ok")
    assert verdict.build_tier == "lite" and verdict.build_s == again.seconds
    assert verdict.run_s > needed.run_s
    assert given and not any(given), "only the whole request gets what an earlier run had made"


def test_builds_asked_for_one_after_the_other_come_to_an_end(verify, monkeypatch):
    """Its next name depends on what was answered before, which a failed build tells again."""
    code = module(
        """while True:
    self.asked += 1
    try:
        load_inline(name=f'endless_{self.asked}', cpp_sources='', functions=[])
    except RuntimeError:
        pass""",
        before="from torch.utils.cpp_extension import load_inline",
        init="self.asked = 0",
    )
    asked = []

    def fails(spec):
        asked.append(spec.name)
        return Build(ok=False, key=spec.key, reason=Reason.BUILD_FAILED, lasting=False)

    prepared = verify.preparer.prepare(kernels.candidate(AFFINE, code), AFFINE)
    monkeypatch.setattr(verify.runner.builder, "build", fails)
    verdict = verify.evaluator.run(AFFINE, kernels.candidate(AFFINE, code), prepared)
    assert_reason(verdict, "build")
    assert asked == [f"endless_{n + 1}" for n in range(MOST_BUILDS)]


@pytest.mark.parametrize(
    "first, reason",
    [
        ("self.started = torch.zeros(1).cuda()", "exception"),
        pytest.param("any(False for _ in iter(int, 1))", "load", marks=pytest.mark.slow),
    ],
)
def test_a_constructor_that_fails_without_its_kernels_or_hangs_is_left_to_the_run(
    verify, monkeypatch, first, reason
):
    made = kernels.candidate(AFFINE, LATE.replace("self.ext = ", f"{first}\n        self.ext = "))
    request = Child.request

    def hurried(self, asked, timeout, fds=()):
        """Only what may hang is waited for briefly."""
        brief = reason == "load" and isinstance(asked, CaptureConstructor | LoadCandidate)
        return request(self, asked, 2 if brief else timeout, fds)

    monkeypatch.setattr(Child, "request", hurried)
    prepared = verify.preparer.prepare(made, AFFINE)
    assert prepared.finding is None and not prepared.libraries
    assert_reason(verify.evaluator.run(AFFINE, made, prepared), reason)


def test_a_wrong_call_of_load_inline_never_reaches_a_device(verify):
    code = module(
        "return ext.affine(x)", extension="load_inline(name='nothing', functions=['affine'])"
    )
    prepared = verify.preparer.prepare(kernels.candidate(AFFINE, code), AFFINE)
    assert prepared.finding is not None and prepared.finding.reason == "exception"
    assert "cpp_sources" in prepared.finding.detail and "Traceback" in prepared.finding.log


def test_a_candidate_that_fails_on_the_declared_inputs_costs_no_other_expected_values(monkeypatch):
    """And no process of a candidate is alive while they are computed."""
    asked, alive = [], set()
    request, close = Child.request, Child.close

    def heard(self, question, *rest):
        asked.extend([question.name] if isinstance(question, Expect) else [])
        alive.update({self} if self.role == "candidate" else ())
        # the last tells why an answer is wrong that is known to be
        assert not isinstance(question, Expect) or not alive or question.name == "drawn_again"
        return request(self, question, *rest)

    def closed(self):
        close(self)
        alive.discard(self)

    monkeypatch.setattr(Child, "request", heard)
    monkeypatch.setattr(Child, "close", closed)
    fails, wrong = module("raise ValueError('no')"), module("return ext.affine(x) + 1.0")
    constant = kernel_task(task_source("return x * 0.0 + 1.0"), "constant")
    with verifying() as verify:
        for task, reason in ((AFFINE, "ok"), (constant, "degenerate_task")):
            asked.clear()
            assert_reason(verify(task, fails), "exception")
            assert asked == ["declared"]
            assert_reason(verify(task, wrong), "wrong_output" if reason == "ok" else reason)
            assert (asked == ["declared", "drawn_again"]) == (reason == "ok"), (
                "or the task is asked"
            )
            assert_reason(verify(task, calls("affine")), reason)
            assert "in_place" in asked
            assert_reason(verify(task, fails), "exception")  # whatever is known of the task by now


@pytest.mark.slow
def test_weights_that_were_made_elsewhere_get_a_reference_that_was_made_there(monkeypatch):
    """On a CPU nothing is elsewhere: the answer is put in the candidate's mouth, what follows is
    real. `cpu:0` is another name of `cpu`."""
    references = []
    load = CandidateProcess.load

    def says_elsewhere(self):
        references.append(self.reference.construct_on)
        if len(references) == 1:
            raise MadeElsewhere
        load(self)

    monkeypatch.setattr(CandidateProcess, "load", says_elsewhere)
    with verifying(device="cpu:0") as verify:
        for _ in range(2):
            assert_reason(verify(WEIGHTED, GAIN), "ok")
    served = "the second candidate is served by the reference at hand, the first one tried before"
    assert references == ["cpu:0", "cpu", "cpu", "cpu"], served
