// Streams come from Python as handles (`stream.cuda_stream`), so that nothing but the runtime's
// header is needed.
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
