"""One real tiny kernel for every verdict that can happen on a CPU: the status, the reason and, for
honest twins, the absence of both."""

import uuid

import pytest

from kernels_eval.config import BuildConfig
from kernels_eval.judge.candidate_handle import CandidateProcess, MadeElsewhere
from kernels_eval.protocol import Call, CaptureConstructor, Expect, LoadCandidate
from kernels_eval.records import Status
from kernels_eval.sandbox.child import Child
from tests.support import kernels
from tests.support.adversarial import bounded
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
        and verdict.correctness.trials == 8
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
    assert verdict.correctness is not None and verdict.correctness.trials == 10
    assert "weights_not_mappable" not in verdict.flags


# -- wrong answers ---------------------------------------------------------------------------------

WRONG = {
    "wrong_output": calls("shifted"),
    "wrong_output: a single element": calls("one_wrong"),
    "wrong_shape": module("return ext.affine(x).flatten()"),
    "wrong_shape: two outputs": module("return ext.affine(x), ext.affine(x)"),
    "wrong_dtype": module("return ext.affine(x).double()"),
    "wrong_device": module("return ext.affine(x).to('meta')"),
    "non_finite": calls("with_nan"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_answers(verify, case):
    verdict = verify(AFFINE, WRONG[case])
    assert_reason(verdict, case.partition(":")[0])
    assert verdict.outputs_match is False and not verdict.correct_any


# -- no custom kernel, and cheating: more in adversarial/ ------------------------------------------


def test_torch_doing_the_work_is_not_a_kernel(verify):
    verdict = verify(AFFINE, module("return x * 2.0 + 1.0"))
    assert_reason(verdict, "no_custom_kernel")
    assert verdict.outputs_match and verdict.correct_any and not verdict.correct_custom
    assert any("mul" in name for name in verdict.library_calls)


FORGED_CLOCK = """
import sys
stopwatch = vars(sys.modules["kernels_" + "eval.model.model_runner"])
real = stopwatch["now_ns"]
stopwatch["now_ns"] = lambda: real() // 10
"""


def test_a_forged_clock_wins_nothing(verify):
    """Found out, or on a machine that gets busy meanwhile: timed as what the parent's clock bears
    out."""
    verdict = verify(AFFINE, module("return ext.affine(x)", after=FORGED_CLOCK))
    assert verdict.reason in ("implausible_time", "ok"), verdict.detail
    if verdict.reason == "ok":
        bounded(verdict)


# -- building --------------------------------------------------------------------------------------


UNBUILT = {
    "build_failed": (
        "torch::Tensor f(torch::Tensor x) {\n  return x + not_declared_anywhere;\n}\n",
        "not_declared_anywhere",
    ),
    "undefined_symbol": (
        "torch::Tensor missing(torch::Tensor x);\n"
        "torch::Tensor f(torch::Tensor x) { return missing(x); }\n",
        "",
    ),
}


@pytest.mark.parametrize("reason", UNBUILT)
def test_sources_that_make_no_library(verify, reason):
    source, said = UNBUILT[reason]
    extension = load_inline(source, name=f"{reason}_ext")
    verdict = verify(AFFINE, module("return ext.f(x)", extension=extension))
    assert_reason(verdict, reason)
    assert said in verdict.log_tail


FAULTS = {
    "syntax_error": ("import torch\nclass ModelNew(torch.nn.Module:\n    pass\n", "line 2"),
    "no_module: beside an extension": (
        module("return ext.affine(x)", before="import a_module_nobody_has"),
        "a_module_nobody_has",
    ),
    "no_module: without one": (
        "import a_module_nobody_has\nclass ModelNew:\n    pass\n",
        "a_module_nobody_has",
    ),
    "exception": (module("raise ValueError('a shape I do not like')"), "a shape I do not like"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_python_that_fails(verify, case):
    code, said = FAULTS[case]
    verdict = verify(AFFINE, code)
    assert_reason(verdict, case.partition(":")[0])
    assert said in verdict.detail


# -- running ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["aborts", "null_write"])
def test_a_native_crash_costs_its_own_verdict_only(verify, function):
    verdict = verify(AFFINE, calls(function))
    assert_reason(verdict, "crashed")
    assert "SIG" in verdict.detail
    assert_reason(verify(AFFINE, calls("affine")), "ok")


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


@pytest.mark.parametrize("where", ["before", "init"])
def test_an_import_or_a_constructor_that_does_not_end(hasty, where):
    code = module("return ext.affine(x)", **{where: "while True:\n    pass"})
    assert_reason(hasty(AFFINE, code), "load")


# -- no code, and tasks that cannot be used --------------------------------------------------------


@pytest.mark.parametrize("reason", ["no_code_block", "truncated", "missing_model_new"])
def test_a_response_without_a_module(verify, reason):
    assert_reason(verify(AFFINE, None, parse_reason=reason), reason)


def test_a_module_without_model_new(verify):
    verdict = verify(AFFINE, module("return ext.affine(x)").replace("ModelNew", "Model"))
    assert_reason(verdict, "missing_model_new")


def test_a_reference_that_cannot_judge(verify):
    broken = kernel_task(task_source("raise ValueError('the reference is broken')"), "raises")
    assert_reason(verify(broken, calls("affine")), "reference_failed")


def test_a_task_that_refuses_most_inputs_judges_by_those_it_takes(verify):
    """Few matrices have a Cholesky factor: that the reference fails on others says that it depends
    on them, and nothing of the task."""
    positive = "[(lambda a: a @ a.T + 64 * torch.eye(64))(torch.rand(64, 64))]"
    task = kernel_task(task_source("return torch.linalg.cholesky(x)", inputs=positive), "cholesky")
    verdict = verify(task, calls("affine"))
    assert_reason(verdict, "wrong_output")
    assert not any(flag.startswith("task_ignores_input") for flag in verdict.flags)


# -- honest twins: each looks like something above, and is correct ---------------------------------

INTEGERS = kernel_task(
    task_source("return x * 3 - 1", inputs="[torch.randint(0, 100, (64, 64))]"), "integers"
)
PAIR = kernel_task(task_source("return x * 2.0 + 1.0, x.sum(1)"), "pair")
BOOK = kernel_task(
    task_source(
        "return x * self.scale + 1.0", init="self.scale = scale", init_inputs="[[], {'scale': 2.0}]"
    ),
    "book",
    init_form="args_kwargs",
)
TWO_SOURCES = """load_inline(name='two_sources_ext', cpp_sources=[
    'static float twice(float v) { return 2.0f * v; }',
    'torch::Tensor affine(torch::Tensor x) {'
    '  auto y = torch::empty_like(x);'
    '  for (int64_t i = 0; i < x.numel(); ++i) y.data_ptr<float>()[i] = \
twice(x.data_ptr<float>()[i]) + 1.0f;'
    '  return y; }',
], functions={'affine': 'twice and one'}, extra_cflags=['-O2'])"""
LATE = module("return self.ext.affine(x)", extension="None", init=f"self.ext = {load_inline()}")
TWINS = {
    "try_around_an_import": (
        AFFINE,
        module(
            "return ext.affine(x)",
            before=(
                "try:\n    import a_module_nobody_has\nexcept ImportError:\n    a_module_nobody_has"
                " = None"
            ),
        ),
    ),
    "built_in_the_constructor": (AFFINE, LATE),
    "several_sources_and_functions_as_dict": (
        AFFINE,
        module("return ext.affine(x)", extension=TWO_SOURCES),
    ),
    "book_form": (BOOK, module("return ext.affine(x)")),
    "integer_input": (INTEGERS, module("return ext.integers(x)")),
    "several_outputs": (PAIR, module("return ext.affine(x), ext.row_sum(x)")),
}


@pytest.mark.parametrize("twin", TWINS)
def test_honest_twins_are_correct(verify, twin):
    task, code = TWINS[twin]
    assert_reason(verify(task, code), "ok")


OWN_BINDING = load_inline(
    "static at::Tensor affine(at::Tensor x) { return at::add(at::mul(x, 2.0), 1.0); }\n"
    'PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("affine", &affine); }\n',
    name="own_binding_ext",
)
FRONTEND = load_inline(
    "namespace F = torch::nn::functional;\ntorch::Tensor affine(torch::Tensor x) { return"
    " F::relu(x) * 2 - F::relu(-x) * 2 + 1; }\n",
    name="frontend_ext",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "extension", [OWN_BINDING, FRONTEND], ids=["own_binding", "torch_nn_functional"]
)
def test_sources_that_need_torchs_whole_header(verify, extension):
    verdict = verify(AFFINE, module("return ext.affine(x)", extension=extension))
    assert_reason(verdict, "ok")
    assert verdict.build_tier == "full"


def test_what_a_constructor_asks_for_is_built_before_the_device_is_held(verify):
    made = kernels.candidate(AFFINE, LATE)
    ahead, late = verify.preparer.prepare(made, AFFINE), verify.preparer.prepare(made)
    assert ahead.libraries and not late.libraries
    for prepared in (ahead, late):
        assert_reason(verify.evaluator.run(AFFINE, made, prepared), "ok")


@pytest.mark.parametrize(
    "first, reason",
    [
        ("self.started = torch.zeros(1).cuda()", "exception"),
        ("any(False for _ in iter(int, 1))", "load"),
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


def test_inputs_that_break_the_references_device_are_left_out(verify):
    """Labels out of range end a CUDA context. Said here by the message alone: what counts is that a
    new process goes on without them."""
    forward = (
        "if float(x.min()) > 100:\n    raise RuntimeError('CUDA error: device-side assert"
        " triggered')\nreturn x * 2.0 + 1.0"
    )
    picky = kernel_task(task_source(forward), "picky_about_offsets")
    verdict = verify(picky, calls("affine"))
    assert_reason(verdict, "ok")
    assert verdict.correctness is not None and verdict.correctness.trials == 7


def test_a_candidate_that_fails_in_its_first_call_costs_no_expected_values(monkeypatch):
    """And no process of a candidate is alive while they are computed."""
    asked, alive = [], set()
    request, close = Child.request, Child.close

    def heard(self, question, *rest):
        asked.append((self.role, type(question)))
        alive.update({self} if self.role == "candidate" else ())
        assert not isinstance(question, Expect) or not alive
        return request(self, question, *rest)

    def closed(self):
        close(self)
        alive.discard(self)

    monkeypatch.setattr(Child, "request", heard)
    monkeypatch.setattr(Child, "close", closed)
    fails = module("raise ValueError('no')")
    constant = kernel_task(task_source("return x * 0.0 + 1.0"), "constant")
    with verifying() as verify:
        for task, reason in ((AFFINE, "ok"), (constant, "degenerate_task")):
            asked.clear()
            assert_reason(verify(task, fails), "exception")
            assert ("reference", Expect) not in asked and ("candidate", Call) in asked
            assert_reason(verify(task, calls("affine")), reason)
            assert ("reference", Expect) in asked
            assert_reason(verify(task, fails), "exception")  # whatever is known of the task by now


def test_weights_that_were_made_elsewhere_get_a_reference_that_was_made_there(monkeypatch):
    """On a CPU nothing is elsewhere: the answer is put in the candidate's mouth, what follows is
    real. `cpu:0` is another name of `cpu`."""
    references = []
    load = CandidateProcess.load

    def says_elsewhere(self, libraries):
        references.append(self.reference.construct_on)
        if len(references) == 1:
            raise MadeElsewhere
        load(self, libraries)

    monkeypatch.setattr(CandidateProcess, "load", says_elsewhere)
    with verifying(device="cpu:0") as verify:
        for _ in range(2):
            assert_reason(verify(WEIGHTED, GAIN), "ok")
    served = "the second candidate is served by the reference at hand, the first one tried before"
    assert references == ["cpu:0", "cpu", "cpu", "cpu"], served


def test_what_is_built_late_is_screened_as_well(verify):
    source = 'torch::Tensor f(torch::Tensor x) { auto r = system("true"); return x * (2 + r) + 1; }'
    code = module(
        "return self.ext.f(x)",
        extension="None",
        init=f"self.ext = {kernels.load_inline(source, name='late_call')}",
    )
    verdict = verify(AFFINE, code)
    assert_reason(verdict, "forbidden_call")
    assert verdict.detail == "native source, line 1: calls system"
