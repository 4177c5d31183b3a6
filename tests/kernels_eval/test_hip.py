"""CUDA sources as HIP: what is kept, what is translated, and what hipcc makes of it where it is."""

import shutil

import pytest

from kernels_eval.build import hip
from kernels_eval.build.hip import compile_hip, translated
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
        ("int f() { return 1; }", "no kernel is instantiated"),
        ("#include <cub/cub.cuh>\n__global__ void f() { cub::x(); }", "'cub'"),
    ],
)
def test_what_does_not_compile_says_why(source, says):
    build = compile_hip(source)
    assert not build.compiled and says in build.reason and not build.kernels


def test_without_hipcc_the_fix_is_named(monkeypatch):
    monkeypatch.setattr(hip.shutil, "which", lambda _: None)
    with pytest.raises(ToolchainError, match="apt-get install hipcc"):
        compile_hip(SOURCE)
