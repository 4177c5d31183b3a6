"""The verdicts that need a GPU: CUDA and Triton kernels, real faults of the device, and that one
fault costs one verdict."""

import pytest

from kernels_eval.records import Language
from tests.support.kernels import assert_reason, kernel_task, module, task_source, verifying_on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

AFFINE = kernel_task(
    task_source("return x * 2.0 + 1.0", inputs="[torch.randn(512, 512)]"), "affine_gpu"
)

LAUNCH = """
  auto y = torch::empty_like(x);
  const int n = x.numel();
  affine_kernel<<<(n + 255) / 256, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), n);
  return y;
"""


def cuda_source(statement):
    return (
        "__global__ void affine_kernel(const float* x, float* y, int n) {\n"
        "  const int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        f"  if (i < n) {statement}\n"
        "}\n"
        f"torch::Tensor affine(torch::Tensor x) {{{LAUNCH}}}\n"
    )


def cuda_module(statement, forward="return ext.affine(x)", *, name):
    extension = (
        f"load_inline(name={name!r}, cpp_sources='torch::Tensor affine(torch::Tensor x);', "
        f"cuda_sources={cuda_source(statement)!r}, functions=['affine'])"
    )
    return module(forward, extension=extension)


RIGHT = cuda_module("y[i] = x[i] * 2.0f + 1.0f;", name="gpu_right")

TRITON = """
import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def affine_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(y_ptr + offsets, x * 2.0 + SHIFT, mask=mask)


class ModelNew(nn.Module):
    def forward(self, x):
        y = torch.empty_like(x)
        n = x.numel()
        affine_kernel[(triton.cdiv(n, 1024),)](x, y, n, BLOCK=1024)
        return y
"""


@pytest.fixture(scope="module")
def verify():
    with verifying_on_gpu() as judge:
        yield lambda code, language=Language.CUDA, task=AFFINE: judge(task, code, language=language)


def test_a_correct_cuda_kernel(verify):
    verdict = verify(RIGHT)
    assert_reason(verdict, "ok")
    assert verdict.custom_kernels == (
        "affine_kernel(float const*, float*, int)",
    ) and verdict.device not in ("", "cpu")
    assert (
        verdict.timing is not None
        and verdict.timing.candidate_ms >= 0.8 * verdict.timing.clock_bound_ms
    )


def test_a_wrong_cuda_kernel(verify):
    assert_reason(
        verify(cuda_module("y[i] = x[i] * 2.0f + 1.5f;", name="gpu_wrong")), "wrong_output"
    )


def test_an_answer_of_zeros_for_its_own_inputs(verify):
    """KernelBench's L2/9: its ReLU lets nothing through. Memory that is used again holds the right
    zeros where no kernel is launched."""
    task = kernel_task(
        task_source("return torch.relu(x - 20.0)", inputs="[torch.rand(512, 512)]"), "zeros_gpu"
    )
    own = "y[i] = fmaxf(x[i] - 20.0f, 0.0f);"
    assert_reason(verify(cuda_module(own, name="gpu_zeros"), task=task), "ok")
    triton = TRITON.replace("x * 2.0 + SHIFT", "tl.maximum(x - 20.0, 0.0)")
    assert_reason(verify(triton, Language.TRITON, task), "ok")
    ornament = cuda_module(own, "ext.affine(x)\nreturn torch.relu(x - 20.0)", name="gpu_zeros")
    assert_reason(verify(ornament, task=task), "no_custom_kernel")


def test_a_fault_of_the_device_costs_one_verdict(verify):
    """A write far outside every allocation: the context is lost, the next candidate and its
    reference are not."""
    verdict = verify(
        cuda_module("*(volatile float*)(((long long)1 << 44) + 8ll * i) = x[i];", name="gpu_fault")
    )
    assert_reason(verdict, "cuda_error")
    assert_reason(verify(RIGHT), "ok")


def test_a_cuda_kernel_that_is_never_called(verify):
    verdict = verify(
        cuda_module("y[i] = x[i] * 2.0f + 1.0f;", "return x * 2.0 + 1.0", name="gpu_right")
    )
    assert_reason(verdict, "no_custom_kernel")
    assert verdict.outputs_match


def test_a_cuda_source_that_does_not_compile(verify):
    verdict = verify(cuda_module("y[i] = never_declared(x[i]);", name="gpu_broken"))
    assert_reason(verdict, "build_failed")
    assert "never_declared" in verdict.log_tail


def test_a_kernel_that_does_not_end(verify):
    verdict = verify(
        cuda_module("while (true) { *(volatile float*)&y[i] = x[i]; }", name="gpu_spin")
    )
    assert_reason(verdict, "run")
    assert_reason(verify(RIGHT), "ok")


def test_a_correct_triton_kernel(verify):
    verdict = verify(TRITON.replace("SHIFT", "1.0"), Language.TRITON)
    assert_reason(verdict, "ok")
    assert verdict.custom_kernels == ("affine_kernel",)


def test_a_wrong_triton_kernel(verify):
    assert_reason(verify(TRITON.replace("SHIFT", "1.5"), Language.TRITON), "wrong_output")


def test_a_triton_kernel_that_does_not_compile(verify):
    verdict = verify(TRITON.replace("SHIFT", "never_declared"), Language.TRITON)
    assert_reason(verdict, "build_failed")
    assert "never_declared" in verdict.detail + verdict.log_tail


def test_weights_made_by_the_old_constructor_on_the_cpu(verify):
    """`torch.Tensor(...)` knows nothing of a default device: its weights come from the CPU's
    generator, as all do under KernelBench."""
    init = "self.weight = nn.Parameter(torch.empty(64))\nnn.init.normal_(self.weight)"
    task = kernel_task(task_source("return x + self.weight", init=init), "weights_made_on_the_cpu")
    statement = "y[i] = x[i];"
    code = cuda_module(statement, "return ext.affine(x) + self.weight", name="made_on_the_cpu")
    code = code.replace(
        "super().__init__()",
        "super().__init__()\n        self.weight = nn.Parameter(torch.Tensor(64))",
    )
    code = code.replace(
        "torch.Tensor(64))", "torch.Tensor(64))\n        nn.init.normal_(self.weight)"
    )
    assert_reason(verify(code, task=task), "ok")
