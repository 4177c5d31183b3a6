"""CUDA candidates compiled for several architectures: what is noted of each, and that a verdict
which nobody asked for more than before is written as before."""

from __future__ import annotations

from contextlib import closing

import pytest

from kernels_eval.compile import extensions
from kernels_eval.compile.extensions import Builder
from kernels_eval.config import BuildConfig, EvalConfig
from kernels_eval.errors import ToolchainError
from kernels_eval.judge.messages import Finding, Prepared, verdict_of
from kernels_eval.judge.prepare import Preparer
from kernels_eval.records import ArchitectureBuild, Candidate, KernelTask, Language, Reason, Verdict
from kernels_eval.source.spec import ExtensionSpec
from tasks.tables import VERDICTS
from tasks.verification.config import VerificationConfig

HAS_NVCC = Builder(BuildConfig()).tools.nvcc is not None
needs_nvcc = pytest.mark.skipif(not HAS_NVCC, reason="needs nvcc")
KERNEL = """
__global__ void half_of(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x] / 2; }
void run(at::Tensor x, at::Tensor y) {
  half_of<<<1, 32>>>(x.data_ptr<float>(), y.data_ptr<float>());
}
"""
NEWER = """
__global__ void wait(float* x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#error "needs a cluster"
#endif
  asm volatile("barrier.cluster.arrive;");
}
void run(at::Tensor x, at::Tensor y) { wait<<<1, 32>>>(x.data_ptr<float>()); }
"""
SPILLING = """
__global__ void many(const float* x, float* y) {
  float held[64];
  #pragma unroll
  for (int i = 0; i < 64; ++i) held[i] = x[i * 32 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 64; ++i) y[i * 32 + threadIdx.x] = held[i] * held[63 - i];
}
void run(at::Tensor x, at::Tensor y) { many<<<1, 32>>>(x.data_ptr<float>(), y.data_ptr<float>()); }
"""


def spec(cuda: str, *flags: str) -> ExtensionSpec:
    return ExtensionSpec(
        name="several",
        cpp_sources=("void run(at::Tensor x, at::Tensor y);",),
        cuda_sources=(cuda,),
        functions=("run",),
        extra_cuda_cflags=flags,
    )


def noted(cuda: str, *flags: str, on: tuple[str, ...] = ("sm_80", "sm_90")):
    builder = Builder(BuildConfig(architectures=on))
    asked = spec(cuda, *flags)
    build = builder.build(asked)
    return build, {each.arch: each for each in builder.for_architectures([(asked, build)])}


@needs_nvcc
@pytest.mark.slow
def test_each_architecture_says_whether_it_builds_and_what_it_takes():
    build, found = noted(KERNEL)
    assert build.ok and list(found) == ["sm_80", "sm_90"]
    for each in found.values():
        assert each.builds and 4 <= (each.registers or 0) <= 64 and each.spill_bytes == 0
    _, found = noted(SPILLING, "-maxrregcount=32")
    assert all(each.registers == 32 and each.spill_bytes > 0 for each in found.values())


@needs_nvcc
@pytest.mark.slow
def test_one_that_an_architecture_lacks_does_not_build_there():
    build, found = noted(NEWER, "-gencode=arch=compute_90,code=sm_90")
    assert build.ok
    assert found["sm_90"].builds and not found["sm_80"].builds
    assert "needs a cluster" in found["sm_80"].detail and found["sm_80"].registers is None


@needs_nvcc
def test_an_architecture_that_nvcc_does_not_know_is_refused():
    builder = Builder(BuildConfig(architectures=("sm_20",)))
    build = extensions.Build(ok=False, key="k", tier="lite", reason=Reason.BUILD_FAILED)
    with pytest.raises(ToolchainError, match=r"does not compile for sm_20.*name some of .*sm_90"):
        list(builder.for_architectures([(spec(KERNEL), build)]))
    refused = build.model_copy(update={"tier": ""})  # no compiler saw it
    assert not list(builder.for_architectures([(spec(KERNEL), refused)]))


@pytest.mark.parametrize(
    ("flags", "arch", "kept"),
    [
        (["-O3", "-arch=sm_80", "--use_fast_math"], "-arch=sm_90", ["-O3", "--use_fast_math"]),
        (["-gencode", "arch=compute_90a,code=sm_90a", "-O2"], "-arch=sm_90a", ["-O2"]),
        (["--gpu-architecture", "sm_75"], "-arch=sm_90", []),
        (["-Xptxas", "-O3"], "-arch=sm_90", ["-Xptxas", "-O3"]),
    ],
)
def test_flags_of_a_candidate_that_name_another_give_way(flags, arch, kept, tmp_path):
    attempt = Builder(BuildConfig()).attempt(spec(KERNEL, *flags), "full", tmp_path)
    attempt._includes = lambda headers: []  # those of torch are made first
    command = attempt.command("cuda.cu", "sm_90")
    assert [part for part in command if "arch" in part] == [arch]
    assert command[command.index("-ccbin") + 2 :] == kept
    plain = attempt.command("cuda.cu")
    assert plain[plain.index("-ccbin") + 2 :] == flags


MODULE = """
import torch
from torch.utils.cpp_extension import load_inline
source = {source!r}
extension = load_inline(
    "e", "void run(at::Tensor x, at::Tensor y);", source, functions=["run"])
class ModelNew(torch.nn.Module): pass
"""


@needs_nvcc
@pytest.mark.slow
def test_a_candidate_that_builds_nowhere_says_so_and_keeps_its_verdict():
    config = EvalConfig(build=BuildConfig(architectures=("sm_80", "sm_90")))
    with closing(Preparer(config)) as preparer:
        for source, builds in {KERNEL: True, KERNEL.replace("/ 2", "/ nowhere"): False}.items():
            code = MODULE.format(source=source)
            candidate = Candidate(
                candidate_id="c", task_id="t", language=Language.CUDA, generator="g", code=code
            )
            prepared = preparer.prepare(candidate)
            assert [each.builds for each in prepared.architectures] == [builds, builds]
            assert (prepared.finding is None) == builds
            if prepared.finding:
                assert prepared.finding.reason == Reason.BUILD_FAILED
                assert "nowhere" in prepared.architectures[0].detail


def test_what_nobody_asked_for_is_not_written():
    task = KernelTask(task_id="t", name="t", code="x")
    candidate = Candidate(
        candidate_id="c", task_id="t", language=Language.CUDA, generator="g", code="x"
    )
    prepared, finding = Prepared(candidate_id="c"), Finding(reason=Reason.BUILD_FAILED)
    assert "architectures" not in verdict_of(task, candidate, prepared, finding).model_dump()
    assert "architectures" not in EvalConfig().model_dump()["build"]
    assert "architectures" not in VerificationConfig().model_dump()
    asked = VerificationConfig(architectures=("sm_80",))
    assert asked.protocol.build.architectures == ("sm_80",)
    assert asked.protocol.model_dump() != EvalConfig().model_dump()
    one = ArchitectureBuild(arch="sm_80", builds=True, registers=8, spill_bytes=0)
    held = prepared.model_copy(update={"architectures": (one,)})
    verdict = verdict_of(task, candidate, held, finding)
    assert Verdict.model_validate(verdict.model_dump(mode="json")).architectures == (one,)
    assert "architectures" in VERDICTS.names
    with pytest.raises(ValueError, match="architectures"):
        VerificationConfig(architectures=("9.0",))
