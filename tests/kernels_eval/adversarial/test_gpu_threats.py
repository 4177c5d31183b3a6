"""Threats that need a GPU: streams, graphs, the L2 carve-out, and what a fault leaves behind
(threats 3, 4, 12, 34, 39)."""

import pytest

from tests.support.adversarial import GPU_CORPUS, cases_of, trials
from tests.support.kernels import functions_in, module, verifying_on_gpu
from tests.support.processes import python

# Streams come from Python as handles (`stream.cuda_stream`), so that nothing but the runtime's
# header is needed.
SOURCE = r"""
__global__ void affine_kernel(const float* x, float* y, long n) {
  const long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] * 2.0f + 1.0f;
}
// Waits three million clocks (about 2 ms) before it writes: a reader that does not wait for it
// reads something else.
__global__ void late_affine_kernel(const float* x, float* y, long n) {
  const long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
  const long long started = clock64();
  while (clock64() - started < 3000000) {}
  if (i < n) y[i] = x[i] * 2.0f + 1.0f;
}
__global__ void wild_kernel(const float* x, float* y, long n) {
  const long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
  if (i < n) *(volatile float*)((1ll << 44) + 8 * i) = x[i];
}
static __device__ unsigned to_tf32(float v) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(v));
  return bits;
}
__global__ void product_kernel(const float* x, const float* w, float* y, long rows, long inner,
    long columns, bool tf32) {
  const long j = blockIdx.x * (long)blockDim.x + threadIdx.x, i = blockIdx.y;
  if (j >= columns) return;
  float sum = 0.0f;
  for (long k = 0; k < inner; ++k) {
    float a = x[i * inner + k], b = w[k * columns + j];
    if (tf32) { a = __uint_as_float(to_tf32(a)); b = __uint_as_float(to_tf32(b)); }
    sum = fmaf(a, b, sum);
  }
  y[i * columns + j] = sum;
}

static unsigned blocks(long n) { return (unsigned)((n + 255) / 256); }

torch::Tensor affine_on(torch::Tensor x, int64_t stream) {
  auto in = x.contiguous();
  auto y = torch::empty_like(in);
  affine_kernel<<<blocks(in.numel()), 256, 0, (cudaStream_t)stream>>>(in.data_ptr<float>(),
      y.data_ptr<float>(), in.numel());
  return y;
}
torch::Tensor affine_into(torch::Tensor x, torch::Tensor y, int64_t stream) {
  affine_kernel<<<blocks(x.numel()), 256, 0, (cudaStream_t)stream>>>(x.data_ptr<float>(),
      y.data_ptr<float>(), x.numel());
  return y;
}
torch::Tensor late_affine_on(torch::Tensor x, int64_t stream) {
  auto in = x.contiguous();
  auto y = torch::empty_like(in);
  late_affine_kernel<<<blocks(in.numel()), 256, 0, (cudaStream_t)stream>>>(in.data_ptr<float>(),
      y.data_ptr<float>(), in.numel());
  return y;
}
torch::Tensor late_affine_aside(torch::Tensor x) {
  static cudaStream_t aside = nullptr;
  if (!aside) cudaStreamCreateWithFlags(&aside, cudaStreamNonBlocking);
  return late_affine_on(x, (int64_t)aside);
}
torch::Tensor wild(torch::Tensor x) {
  auto y = torch::empty_like(x);
  wild_kernel<<<blocks(x.numel()), 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), x.numel());
  return y;
}
int64_t persisting_l2(int64_t set) {
  size_t bytes = 0;
  cudaDeviceGetLimit(&bytes, cudaLimitPersistingL2CacheSize);
  if (set) cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, 8 << 20);
  return (int64_t)bytes;
}
int64_t leak(int64_t megabytes) {
  void* lost = nullptr;
  return cudaMalloc(&lost, (size_t)megabytes << 20) == cudaSuccess
      ? cudaMemset(lost, 1, (size_t)megabytes << 20) : -1;
}
int64_t affine_at(int64_t from, int64_t to, int64_t count) {
  affine_kernel<<<blocks(count), 256>>>((const float*)from, (float*)to, count);
  return 0;
}
torch::Tensor unwritten(torch::Tensor x) { return torch::empty_like(x); }
torch::Tensor product(torch::Tensor x, torch::Tensor w, int64_t tf32, int64_t stream) {
  auto a = x.contiguous(), b = w.contiguous();
  const long rows = a.size(0), inner = a.size(1), columns = b.size(1);
  auto y = torch::empty({rows, columns}, a.options());
  product_kernel<<<dim3(blocks(columns), (unsigned)rows), 256, 0, (cudaStream_t)stream>>>(
      a.data_ptr<float>(), b.data_ptr<float>(), y.data_ptr<float>(), rows, inner, columns,
      tf32 != 0);
  return y;
}
"""
DECLARED = """
torch::Tensor affine_on(torch::Tensor x, int64_t stream);
torch::Tensor affine_into(torch::Tensor x, torch::Tensor y, int64_t stream);
torch::Tensor late_affine_on(torch::Tensor x, int64_t stream);
torch::Tensor late_affine_aside(torch::Tensor x);
torch::Tensor wild(torch::Tensor x);
int64_t persisting_l2(int64_t set);
int64_t leak(int64_t megabytes);
int64_t affine_at(int64_t from, int64_t to, int64_t count);
torch::Tensor unwritten(torch::Tensor x);
torch::Tensor product(torch::Tensor x, torch::Tensor w, int64_t tf32, int64_t stream);
"""
EXTENSION = (
    f"load_inline(name='adversarial_gpu', cpp_sources={DECLARED!r}, cuda_sources={SOURCE!r},"
    f" functions={functions_in(SOURCE)!r}, extra_cuda_cflags=['-O2'])"
)


CUBLAS = r"""
extern "C" int cublasCreate_v2(void**);
extern "C" int cublasSgemm_v2(void*, int, int, int, int, int, const float*, const float*, int,
    const float*, int, const float*, float*, int);
torch::Tensor product(torch::Tensor x, torch::Tensor w) {
  static void* handle = nullptr;
  if (!handle) cublasCreate_v2(&handle);
  auto a = x.contiguous(), b = w.contiguous();
  auto y = torch::empty({a.size(0), b.size(1)}, a.options());
  const int rows = a.size(0), inner = a.size(1), columns = b.size(1);
  const float one = 1.0f, zero = 0.0f;
  cublasSgemm_v2(handle, 0, 0, columns, rows, inner, &one, b.data_ptr<float>(), columns,
      a.data_ptr<float>(), inner, &zero, y.data_ptr<float>(), columns);
  return y;
}
"""
BY_CUBLAS = (
    "load_inline(name='adversarial_cublas',"
    " cpp_sources='torch::Tensor product(torch::Tensor x, torch::Tensor w);',"
    f" cuda_sources={CUBLAS!r}, functions=['product'], extra_ldflags=['-lcublas'])"
)


EXTENSIONS = {"own": EXTENSION, "cublas": BY_CUBLAS}


def code(forward, extension="own", **parts):
    return module(forward, extension=EXTENSIONS[extension], **parts)


CASES = cases_of(GPU_CORPUS / "gpu_threats.yaml", code)


@pytest.fixture(scope="module")
def judge():
    with verifying_on_gpu() as made:
        yield made


def persisting_l2_changes():
    """Can a process set L2 aside here? Asked in a process of its own."""
    script = (
        "import ctypes, torch; torch.empty(1, device='cuda'); rt = ctypes.CDLL('libcudart.so.13');"
        " v = [ctypes.c_size_t() for _ in '12'];rt.cudaDeviceGetLimit(ctypes.byref(v[0]), 6);"
        " rt.cudaDeviceSetLimit(6, ctypes.c_size_t(8 <<"
        " 20));rt.cudaDeviceGetLimit(ctypes.byref(v[1]), 6); print(v[0].value != v[1].value)"
    )
    return python(script).stdout.strip() == "True"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("trial", trials(CASES, code))
def test_gpu_threats(judge, trial, request):
    if "t34" in request.node.name and not persisting_l2_changes():
        pytest.skip(
            "cudaDeviceSetLimit changes nothing on this machine: there is no carve-out to find"
        )
    trial.assert_judged(judge)
