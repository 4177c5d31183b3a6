"""The example answers of the prompts pass concur's own verifier: what generators are shown would
itself be a good candidate."""

import pytest

from kernels_eval.devices import gpu_arch
from kernels_eval.evaluator import Evaluator
from kernels_eval.judge.prepare import Preparer
from kernels_eval.records import KernelTask, Language
from tasks.synthesis.parsing import parse_response
from tasks.synthesis.prompts import EXAMPLE_TASK
from tests.support import kernels
from tests.support.kernels import QUICK, assert_reason

TASK = KernelTask(task_id="example/bias_relu_add", name="bias_relu_add", code=EXAMPLE_TASK)
DROPS_NAN = "non_finite_inputs_differ"
OF_A_BUSY_MACHINE = {"clock_drift", "throttled", "reference_drift"}
ON_GPU = QUICK.model_copy(
    update={"limits": QUICK.limits.model_copy(update={"run_s": 60, "load_s": 120})}
)


def answer(language):
    """The example as a generator would give it back, taken out by our own parser."""
    parsed = parse_response(
        f"Fuse the three.\n</think>\n\n```python\n{language.example}```\n", finish_reason="stop"
    )
    assert parsed.code == language.example
    return kernels.candidate(TASK, parsed.code, language=language)


def assert_correct(verdict):
    assert_reason(verdict, "ok")
    assert verdict.correct_custom and verdict.outputs_match
    # fmaxf(NaN, 0) is 0: other wording of the examples would ask every kept prompt again
    noticed = {flag.split(":")[0] for flag in verdict.flags} - OF_A_BUSY_MACHINE - {DROPS_NAN}
    assert not noticed, "nothing in an example is even suspicious"


@pytest.mark.slow
def test_the_cpp_example_is_verified_correct():
    evaluator = Evaluator(Language.CPP, QUICK)
    try:
        verdict = evaluator(TASK, answer(Language.CPP))
    finally:
        evaluator.close()
    assert_correct(verdict)
    assert verdict.custom_kernels == ("bias_relu_add",) and verdict.build_tier == "lite"


@pytest.mark.slow
def test_the_cuda_example_builds_without_a_gpu():
    preparer = Preparer(QUICK, cuda_arch="9.0")
    try:
        if preparer.builder.tools.nvcc is None:
            pytest.skip("needs nvcc")
        prepared = preparer.prepare(answer(Language.CUDA), TASK)
    finally:
        preparer.close()
    assert prepared.finding is None, prepared.finding
    assert len(prepared.libraries) == 1 and prepared.tier == "lite" and prepared.flags == ()


def test_the_triton_example_passes_the_screening():
    preparer = Preparer(QUICK)
    try:
        prepared = preparer.prepare(answer(Language.TRITON), TASK)
    finally:
        preparer.close()
    assert prepared.finding is None and prepared.flags == (), prepared


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("language", [Language.CUDA, Language.TRITON])
def test_the_gpu_examples_are_verified_correct(language):
    if gpu_arch() is None:
        pytest.skip("needs an NVIDIA GPU")
    evaluator = Evaluator(language, ON_GPU)
    try:
        verdict = evaluator(TASK, answer(language))
    finally:
        evaluator.close()
    assert_correct(verdict)
    assert any("bias_relu_add" in kernel for kernel in verdict.custom_kernels)
