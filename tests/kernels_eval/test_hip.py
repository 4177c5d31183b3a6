"""CUDA sources as HIP: what is kept, what is translated, and what hipcc makes of it where it is."""

import os
import shutil

import pytest

from kernels_eval.compile import hip
from kernels_eval.compile.cubins import cuobjdump
from kernels_eval.compile.hip import CAUSES, HipBuild, compile_hip, device_code, sass_of, translated
from kernels_eval.errors import ToolchainError

SOURCE = r"""
#include <torch/extension.h>
#include <cuda_runtime.h>  // cudaMemset stays in no comment
#include <math_constants.h>
#define WARP 32
constexpr int BLOCK = 128;
struct Pair { float a; float b; };
template <int N> __device__ float total(float v) {
  for (int o = N / 2; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}
__global__ void sums(const float* x, float* y, Pair p) {
  float v = x[blockIdx.x * BLOCK + threadIdx.x] * p.a;
  if (v == -CUDART_INF_F) v = p.b;
  y[blockIdx.x * BLOCK + threadIdx.x] = total<WARP>(v);
}
torch::Tensor run(torch::Tensor x) {
  auto y = torch::empty_like(x);
  sums<<<1, BLOCK>>>(x.data_ptr<float>(), y.data_ptr<float>(), Pair{1, 2});
  cudaError_t error = cudaGetLastError();
  return y;
}
cudaError_t wait(cudaStream_t s) { return cudaStreamSynchronize(s); }
"""
needs_hipcc = pytest.mark.skipif(not shutil.which("hipcc"), reason="hipcc is not here")


def test_device_code_is_kept_and_named_as_hip_names_it():
    found = translated(SOURCE)
    for text in ("#define WARP 32", "struct Pair { float a; float b; };", "__global__ void sums"):
        assert text in found
    assert "__shfl_xor( v, o)" in found and "__builtin_inff()" in found
    assert "hipError_t wait(hipStream_t s) { return hipStreamSynchronize(s); }" in found
    for text in ("torch", "<<<", "cuda", "CUDART", "math_constants"):
        assert text not in found, text


LAUNCHED = r"""
#include <cub/cub.cuh>
#include "own.h"
template <typename T, int N> __global__ void scaled(const T* x, T* y) { y[threadIdx.x] = x[0] * N; }
torch::Tensor run(torch::Tensor x) {
  constexpr int TILE = 16;
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "run", ([&] {
    scaled<scalar_t, TILE><<<1, 32>>>(x.data_ptr<scalar_t>(), x.data_ptr<scalar_t>());
  }));
  return x;
}
"""


def test_templates_that_are_launched_are_instantiated():
    found = device_code(LAUNCHED)
    assert "(void)&scaled<float, 16>;" in found
    assert "#include <cub/cub.cuh>" in found and "own.h" not in found
    assert "cub.cuh" not in translated(LAUNCHED)
    assert "launched_templates" not in device_code(SOURCE)


def test_hipify_translates_what_the_table_does_not(tmp_path, monkeypatch):
    script = tmp_path / "hipify-perl"
    script.write_text('#!/bin/sh\nsed s/cub::/hipcub::/ "$1"\n')
    script.chmod(0o755)
    source = "__device__ cudaError_t f() { return cub::sum(); }"
    assert "hipError_t f() { return cub::sum(); }" in translated(source)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "hipError_t f() { return hipcub::sum(); }" in translated(source)
    script.write_text("#!/bin/sh\nexit 1\n")
    assert "return cub::sum();" in translated(source)


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("timeout", "timeout"),
        ("no CUDA source with a kernel was found", "no_source"),
        ("no kernel is instantiated in the device code", "no_kernel"),
        ("'hipcub.h' file not found", "missing_header"),
        ("invalid output constraint '=f' in asm", "inline_assembly"),
        ("use of undeclared identifier 'cub'", "unknown_name"),
        ("no matching function for call to 'f'", "no_matching_function"),
        ("expected ';' after expression", "other"),
    ],
)
def test_why_a_source_did_not_compile_has_a_class(reason, cause):
    build = HipBuild(arch="gfx90a", source="", compiled=False, reason=reason)
    assert build.cause == cause and cause in CAUSES
    assert build.model_copy(update={"compiled": True}).cause == ""


@needs_hipcc
@pytest.mark.slow
def test_a_launched_template_compiles_and_a_deadline_ends_a_compiler():
    (kernel,) = compile_hip(LAUNCHED.replace("#include <cub/cub.cuh>", "")).kernels
    assert "scaledIfLi16E" in kernel
    assert compile_hip(LAUNCHED, timeout_s=0.05).cause == "timeout"


@pytest.mark.skipif(not (shutil.which("nvcc") and cuobjdump()), reason="needs nvcc and cuobjdump")
@pytest.mark.slow
def test_machine_code_is_of_the_same_device_code():
    found = sass_of(LAUNCHED.replace("#include <cub/cub.cuh>", ""))
    assert "code for sm_90" in found and "scaledIfLi16E" in found and "EXIT" in found
    assert sass_of("__global__ void f() { nowhere; }") == sass_of("int f();") == ""


def test_without_cuobjdump_there_is_no_machine_code(monkeypatch):
    monkeypatch.setattr(hip, "cuobjdump", lambda: None)
    assert sass_of(SOURCE) == ""


@needs_hipcc
@pytest.mark.slow
def test_a_kernel_reaches_assembly_of_gfx90a():
    build = compile_hip(SOURCE)
    assert build.compiled and not build.reason
    (kernel,) = build.kernels
    assert "sums" in kernel and "s_endpgm" in build.assembly and "gfx90a" in build.assembly


@needs_hipcc
@pytest.mark.slow
@pytest.mark.parametrize(
    "source, says",
    [
        ("__global__ void f(float* a) { a[0] = nowhere; }", "undeclared identifier 'nowhere'"),
        ("template <class T> __global__ void f(T* a) { a[0] = 1; }", "no kernel is instantiated"),
        ("int f() { return 1; }", "no CUDA source"),
        ("#include <cub/cub.cuh>\n__global__ void f() { cub::x(); }", "'cub'"),
    ],
)
def test_what_does_not_compile_says_why(source, says):
    build = compile_hip(source)
    assert not build.compiled and says in build.reason and not build.kernels


def test_the_architecture_is_one_that_this_hipcc_knows(tmp_path, monkeypatch):
    for place, arch in {"usr": "gfx90a", "opt/rocm-6.4": "gfx942"}.items():
        program = tmp_path / place / "bin/hipcc"
        program.parent.mkdir(parents=True)
        program.touch(0o755)
        monkeypatch.setenv("PATH", str(program.parent))
        assert hip.default_arch() == arch


def test_without_hipcc_the_fix_is_named(monkeypatch):
    monkeypatch.setattr(hip.shutil, "which", lambda _: None)
    with pytest.raises(ToolchainError, match="apt-get install hipcc"):
        compile_hip(SOURCE)
