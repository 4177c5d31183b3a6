"""torch.compile as a second baseline on a GPU: inductor's Triton kernels beside CUDA candidates,
and where references spend device time.

    python -m pytest -m gpu tests/kernels_eval/test_compile_baseline_gpu.py

Needs nvcc and Triton, and of Python torch, numpy, pydantic, psutil and pytest.
"""

import os
from contextlib import contextmanager

import pytest

from kernels_eval.config import TimingConfig
from kernels_eval.devices import gpu_arch
from kernels_eval.protocol import TimeOperators
from kernels_eval.records import Language
from kernels_eval.sandbox.child import Child
from kernels_eval.sandbox.server_handle import ForkServer
from tests.support.kernels import (
    QUICK,
    Verifier,
    assert_reason,
    kernel_task,
    module,
    on_gpu,
    task_source,
)

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

INPUTS = "[torch.randn(4096, 4096)]"
CHAIN = kernel_task(
    task_source("return torch.tanh(x * 2.0 + 1.0) * 0.5 - x", inputs=INPUTS), "chain_gpu"
)
"""Five operators of 64 MB each way: fused they move a fifth of the bytes."""
BODY = "y[i] = tanhf(x[i] * 2.0f + 1.0f) * 0.5f - x[i];"
LAUNCH = "  auto y = torch::empty_like(x);\n  const int n = x.numel();\n"
LAUNCH += (
    "  chain_kernel<<<(n + 255) / 256, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), n);\n "
    " return y;\n"
)
KERNEL = (
    "__global__ void chain_kernel(const float* x, float* y, int n) {\n  const int i = blockIdx.x *"
    " blockDim.x + threadIdx.x;\n"
)
SOURCE = f"{KERNEL}  if (i < n) {BODY}\n}}\ntorch::Tensor chain(torch::Tensor x) {{\n{LAUNCH}}}\n"
EXTENSION = (
    "load_inline(name='chain_gpu', cpp_sources='torch::Tensor chain(torch::Tensor x);',"
    f" cuda_sources={SOURCE!r}, functions=['chain'])"
)

TRITON = """
import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def chain_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    e = tl.exp(-2.0 * tl.abs(x * 2.0 + 1.0))
    t = (1.0 - e) / (1.0 + e)
    tl.store(y_ptr + offsets, tl.where(x * 2.0 + 1.0 < 0, -t, t) * 0.5 - x, mask=mask)


class ModelNew(nn.Module):
    def forward(self, x):
        y = torch.empty_like(x)
        n = x.numel()
        chain_kernel[(triton.cdiv(n, 1024),)](x, y, n, BLOCK=1024)
        return y
"""


def made(mode="default", **more):
    return TimingConfig.model_validate(
        {
            "max_s": 1.5,
            "min_pairs": 6,
            "baselines": ("eager", "compile"),
            "compile_mode": mode,
            **more,
        }
    )


class Bench(Verifier):
    def __call__(self, code=None, task=CHAIN, language=Language.CUDA, before=""):
        written = code or module("return ext.chain(x)", extension=EXTENSION, before=before)
        return super().__call__(task, written, language=language)


@contextmanager
def benching(timing):
    config = on_gpu(QUICK).model_copy(update={"timing": timing})
    found = Bench(config, "cuda:0", cuda_arch=gpu_arch())
    with found.evaluator:
        yield found


@pytest.fixture(scope="module")
def bench():
    with benching(made()) as found:
        yield found


def compiled_of(verdict):
    assert_reason(verdict, "ok")
    assert verdict.timing is not None and verdict.timing.compiled is not None
    return verdict.timing.compiled


def test_a_chain_of_operators_is_faster_compiled_and_a_fused_kernel_is_worth_less_against_it(bench):
    verdict = bench()
    compiled, timing = compiled_of(verdict), verdict.timing
    assert compiled.unavailable_reason == "" and compiled.graphs == 1
    assert compiled.reference_ms < 0.6 * timing.reference_ms, "inductor fuses five operators"
    assert timing.speedup > 1.1 and compiled.speedup < 0.7 * timing.speedup
    assert compiled.speedup_lower <= compiled.speedup <= compiled.speedup_upper
    assert verdict.phases.timing_s < 20, "compiling is no part of the window"


def test_the_next_candidates_of_the_task_share_the_compiled_reference(bench):
    first = compiled_of(bench())
    again = compiled_of(bench(before="# another candidate"))
    triton = compiled_of(bench(TRITON, language=Language.TRITON))
    assert again.compile_s < 0.1 and triton.compile_s < 0.1
    assert first.graphs == again.graphs == triton.graphs


def test_a_candidate_that_poisons_triton_and_inductor_poisons_its_own(bench):
    """Triton's candidates may start programs and write caches; theirs are not those of the compiled
    side."""
    before = (
        "import glob, os\nfor root in glob.glob('/tmp/torchinductor_*') +"
        " [os.environ.get('TORCHINDUCTOR_CACHE_DIR', 'none')]:\n"
    )
    before += (
        "    os.makedirs(root, exist_ok=True)\n    with open(root + '/poison', 'w') as handle:\n   "
        "     handle.write('poison')\n"
    )
    before += "vars(triton)['compile'] = None\n"
    poisoned = TRITON.replace("\n\n@triton.jit", f"\n{before}\n\n@triton.jit", 1)
    verdict = bench(poisoned, language=Language.TRITON)
    if verdict.status.value == "correct":
        assert compiled_of(verdict).unavailable_reason == ""
    after = compiled_of(bench(before="# after the poison"))
    assert after.unavailable_reason == "" and after.reference_ms is not None


def test_cuda_graphs_can_be_the_baseline():
    """With reduce-overhead outputs are written over by the next call: the answers that are compared
    are copies."""
    small = kernel_task(
        task_source("return torch.tanh(x * 2.0 + 1.0) * 0.5 - x", inputs="[torch.randn(64, 64)]"),
        "chain_small_gpu",
    )
    with benching(made("reduce-overhead")) as bench:
        compiled = compiled_of(bench(task=small))
    assert compiled.unavailable_reason == "" and compiled.mode == "reduce-overhead"


def test_a_reference_that_does_not_compile_in_time_costs_no_verdict():
    with benching(made(compile_s=0.05)) as bench:
        assert "took longer than 0.05 s" in compiled_of(bench()).unavailable_reason


@pytest.fixture(scope="module")
def profile():
    server = ForkServer(threads=1, readable=())

    def ask(task):
        with Child(server, "profile", QUICK.limits) as child:
            path = child.scratch / "task.py"
            path.write_text(task.code)
            request = TimeOperators(
                path=str(path),
                entry_point="Model",
                init_form="args",
                device="cuda:0",
                threads=1,
                budget_s=0.3,
            )
            return child.request(request, 60)

    yield ask
    server.close()


def test_the_profile_is_of_device_time(profile):
    """A product of 4096 x 4096 matrices takes far longer on the device than an addition; on the
    processor both are a launch."""
    answer = profile(
        kernel_task(task_source("return torch.matmul(x, x) + 1.0", inputs=INPUTS), "matmul_add_gpu")
    )
    assert "error" not in answer, answer
    if os.environ.get("CONCUR_NO_CUPTI"):
        pytest.skip("CUPTI is known to be absent")
    assert answer["clock"] == "device", (
        "CUPTI gives no kernel times in a confined process: set CONCUR_NO_CUPTI=1 if that is known"
    )
    assert [each["name"] for each in answer["operators"][:2]] == ["matmul", "add"]
    assert answer["operators"][0]["us"] > 3 * answer["operators"][1]["us"]
