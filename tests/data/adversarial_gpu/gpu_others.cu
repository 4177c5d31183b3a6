#include <vector>
__global__ void affine_kernel(const float* x, float* y, long n) {
  const long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] * 2.0f + 1.0f;
}
// Answers again and again for so many clocks: whatever comes to lie at x meanwhile is answered.
__global__ void affine_ahead_kernel(const volatile float* x, float* y, long n, long long clocks) {
  const long long started = clock64();
  do {
    for (long i = blockIdx.x * (long)blockDim.x + threadIdx.x; i < n;
        i += gridDim.x * (long)blockDim.x)
      y[i] = x[i] * 2.0f + 1.0f;
  } while (clock64() - started < clocks);
}
__global__ void idle_kernel(long long clocks) {
  const long long started = clock64();
  while (clock64() - started < clocks) {}
}
__global__ void product_kernel(const float* x, const float* w, float* y, long inner, long columns) {
  const long j = blockIdx.x * (long)blockDim.x + threadIdx.x, i = blockIdx.y;
  if (j >= columns) return;
  float sum = 0.0f;
  for (long k = 0; k < inner; ++k) sum = fmaf(x[i * inner + k], w[k * columns + j], sum);
  y[i * columns + j] = sum;
}
__device__ float block_sum(float v) {
  __shared__ float partial[32];
  __shared__ float total;
  for (int step = 16; step; step /= 2) v += __shfl_down_sync(0xffffffffu, v, step);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  if (threadIdx.x < 32) {
    v = threadIdx.x < blockDim.x / 32 ? partial[threadIdx.x] : 0.0f;
    for (int step = 16; step; step /= 2) v += __shfl_down_sync(0xffffffffu, v, step);
    if (threadIdx.x == 0) total = v;
  }
  __syncthreads();
  return total;
}
// Two elements a load, as rows of 1022 floats are aligned for.
__global__ void rms_norm_kernel(const float2* x, const float2* w, float2* y, int pairs) {
  const float2* row = x + (long)blockIdx.x * pairs;
  float square = 0.0f;
  for (int i = threadIdx.x; i < pairs; i += blockDim.x)
    square += row[i].x * row[i].x + row[i].y * row[i].y;
  const float scale = rsqrtf(block_sum(square) / (2 * pairs) + 1e-5f);
  for (int i = threadIdx.x; i < pairs; i += blockDim.x)
    y[(long)blockIdx.x * pairs + i] =
        make_float2(row[i].x * scale * w[i].x, row[i].y * scale * w[i].y);
}
__global__ void layer_norm_kernel(const float* x, const float* w, const float* b, float* y, int n,
    bool one_pass) {
  const float* row = x + (long)blockIdx.x * n;
  float sum = 0.0f, square = 0.0f;
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += row[i];
  const float mean = block_sum(sum) / n;
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const float v = one_pass ? row[i] : row[i] - mean;
    square += v * v;
  }
  const float variance = block_sum(square) / n - (one_pass ? mean * mean : 0.0f);
  const float scale = rsqrtf(variance + 1e-5f);
  for (int i = threadIdx.x; i < n; i += blockDim.x)
    y[(long)blockIdx.x * n + i] = (row[i] - mean) * scale * w[i] + b[i];
}
// A warp for each row; the mean is added up by atomics, in an order that is never the same.
__global__ void cross_entropy_kernel(const float* x, const long* labels, float* loss, int rows,
    int n) {
  const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  float top = -INFINITY, sum = 0.0f;
  for (int j = lane; j < n; j += 32) top = fmaxf(top, x[(long)row * n + j]);
  for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
  for (int j = lane; j < n; j += 32) sum += __expf(x[(long)row * n + j] - top);
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (lane == 0) atomicAdd(loss, (__logf(sum) + top - x[(long)row * n + labels[row]]) / rows);
}
__global__ void grad_input_kernel(const float* g, const float* w, float* dx, int out, int in) {
  for (int k = threadIdx.x; k < in; k += blockDim.x) {
    float sum = 0.0f;
    for (int j = 0; j < out; ++j)
      sum = fmaf(g[(long)blockIdx.x * out + j], w[(long)j * in + k], sum);
    dx[(long)blockIdx.x * in + k] = sum;
  }
}
__global__ void grad_weight_kernel(const float* g, const float* x, float* dw, float* db, int rows,
    int out, int in) {
  const int j = blockIdx.x;
  for (int k = threadIdx.x; k < in; k += blockDim.x) {
    float sum = 0.0f;
    for (int i = 0; i < rows; ++i) sum = fmaf(g[(long)i * out + j], x[(long)i * in + k], sum);
    dw[(long)j * in + k] = sum;
  }
  for (int i = threadIdx.x; i < rows; i += blockDim.x) atomicAdd(db + j, g[(long)i * out + j]);
}

static unsigned blocks(long n) { return (unsigned)((n + 255) / 256); }

torch::Tensor affine(torch::Tensor x, int64_t stream) {
  auto y = torch::empty_like(x);
  affine_kernel<<<blocks(x.numel()), 256, 0, (cudaStream_t)stream>>>(x.data_ptr<float>(),
      y.data_ptr<float>(), x.numel());
  return y;
}
torch::Tensor affine_and_work_aside(torch::Tensor x, int64_t stream, int64_t side) {
  idle_kernel<<<1, 32, 0, (cudaStream_t)side>>>(6000000);
  return affine(x, stream);
}
torch::Tensor affine_ahead(torch::Tensor x, int64_t side) {
  static torch::Tensor kept, ready;
  if (!kept.defined() || kept.data_ptr<float>() != x.data_ptr<float>()) {
    kept = x;
    ready = torch::empty_like(x);
  }
  affine_ahead_kernel<<<8, 256, 0, (cudaStream_t)side>>>(kept.data_ptr<float>(),
      ready.data_ptr<float>(), x.numel(), 20000000ll);
  return ready.clone();
}
torch::Tensor slow_affine(torch::Tensor x, int64_t stream, int64_t clocks) {
  idle_kernel<<<1, 32, 0, (cudaStream_t)stream>>>(clocks);
  return affine(x, stream);
}
torch::Tensor product(torch::Tensor x, torch::Tensor w, int64_t stream) {
  auto y = torch::empty({x.size(0), w.size(1)}, x.options());
  product_kernel<<<dim3(blocks(w.size(1)), (unsigned)x.size(0)), 256, 0, (cudaStream_t)stream>>>(
      x.data_ptr<float>(), w.data_ptr<float>(), y.data_ptr<float>(), x.size(1), w.size(1));
  return y;
}
torch::Tensor product_on_new_stream(torch::Tensor x, torch::Tensor w) {
  cudaStream_t fresh;  // never destroyed: that would wait for it
  cudaStreamCreateWithFlags(&fresh, cudaStreamNonBlocking);
  idle_kernel<<<1, 32, 0, fresh>>>(3000000);
  return product(x, w, (int64_t)fresh);
}
// Device memory near a fresh allocation, block by block: `found` gets the start of each that can be
// read.
static std::vector<char*> neighbours(torch::Tensor x, size_t bytes) {
  std::vector<char*> found;
  char* const here = (char*)((size_t)x.data_ptr<float>() & ~((size_t)0x1fffff));
  for (long step = -128; step <= 128; ++step) {
    char* const at = here + step * (2l << 20);
    cudaPointerAttributes seen;
    if (cudaPointerGetAttributes(&seen, at) == cudaSuccess && seen.type == cudaMemoryTypeDevice)
      for (size_t offset = 0; offset + bytes <= (2u << 20); offset += bytes)
        found.push_back(at + offset);
    cudaGetLastError();
  }
  return found;
}
torch::Tensor found_nearby(torch::Tensor x, int64_t overwrite) {
  auto y = torch::zeros_like(x);
  const size_t bytes = x.numel() * sizeof(float);
  float wanted[4], seen[4];
  cudaMemcpy(wanted, x.data_ptr<float>(), sizeof wanted, cudaMemcpyDeviceToHost);
  for (float& v : wanted) v = v * 2.0f + 1.0f;
  for (char* at : neighbours(x, 1 << 16)) {
    if (at == (char*)x.data_ptr<float>() || at == (char*)y.data_ptr<float>()) continue;
    if (cudaMemcpy(seen, at, sizeof seen, cudaMemcpyDeviceToHost) != cudaSuccess) continue;
    if (overwrite) cudaMemset(at, 0, sizeof seen);
    else if (!memcmp(seen, wanted, sizeof seen))
      cudaMemcpy(y.data_ptr<float>(), at, bytes, cudaMemcpyDeviceToDevice);
  }
  cudaGetLastError();
  return y;
}
// Fresh memory of the driver, searched for what another process may have left there.
torch::Tensor found_in_fresh_memory(torch::Tensor x) {
  auto y = torch::zeros_like(x);
  const size_t bytes = x.numel() * sizeof(float), whole = 512u << 20;
  float wanted[4];
  cudaMemcpy(wanted, x.data_ptr<float>(), sizeof wanted, cudaMemcpyDeviceToHost);
  for (float& v : wanted) v = v * 2.0f + 1.0f;
  char* fresh = nullptr;
  if (cudaMalloc(&fresh, whole) != cudaSuccess) return y;
  std::vector<float> seen(4);
  for (size_t at = 0; at + bytes <= whole; at += 65536) {
    cudaMemcpy(seen.data(), fresh + at, 16, cudaMemcpyDeviceToHost);
    if (!memcmp(seen.data(), wanted, sizeof wanted))
      cudaMemcpy(y.data_ptr<float>(), fresh + at, bytes, cudaMemcpyDeviceToDevice);
  }
  cudaFree(fresh);
  return y;
}
// Handles of memory of other processes, made from one of its own by changing a byte.
torch::Tensor found_by_handles(torch::Tensor x) {
  auto y = torch::zeros_like(x);
  char* own = nullptr;
  cudaIpcMemHandle_t handle;
  if (cudaMalloc(&own, 2 << 20) != cudaSuccess) return y;
  if (cudaIpcGetMemHandle(&handle, own) == cudaSuccess)
    for (int position = 0; position < (int)sizeof handle; ++position) {
      cudaIpcMemHandle_t other = handle;
      other.reserved[position] += 1;
      void* mapped = nullptr;
      if (cudaIpcOpenMemHandle(&mapped, other, cudaIpcMemLazyEnablePeerAccess) == cudaSuccess) {
        cudaMemcpy(y.data_ptr<float>(), mapped, x.numel() * sizeof(float),
            cudaMemcpyDeviceToDevice);
        cudaIpcCloseMemHandle(mapped);
      }
    }
  cudaFree(own);
  cudaGetLastError();
  return y;
}
// Under the runtime's own name, in a library loaded late.
extern "C" __attribute__((visibility("default"))) cudaError_t cudaEventElapsedTime(float* ms,
    cudaEvent_t, cudaEvent_t) {
  *ms = 0.001f;
  return cudaSuccess;
}
torch::Tensor rms_norm(torch::Tensor x, torch::Tensor w, int64_t stream) {
  auto y = torch::empty_like(x);
  rms_norm_kernel<<<(unsigned)x.size(0), 256, 0, (cudaStream_t)stream>>>(
      (float2*)x.data_ptr<float>(), (float2*)w.data_ptr<float>(), (float2*)y.data_ptr<float>(),
      (int)(x.size(1) / 2));
  return y;
}
torch::Tensor layer_norm(torch::Tensor x, torch::Tensor w, torch::Tensor b, int64_t one_pass,
    int64_t stream) {
  auto y = torch::empty_like(x);
  layer_norm_kernel<<<(unsigned)x.size(0), 256, 0, (cudaStream_t)stream>>>(x.data_ptr<float>(),
      w.data_ptr<float>(), b.data_ptr<float>(), y.data_ptr<float>(), (int)x.size(1), one_pass != 0);
  return y;
}
torch::Tensor cross_entropy(torch::Tensor x, torch::Tensor labels, int64_t stream) {
  auto loss = torch::zeros({}, x.options());
  cross_entropy_kernel<<<blocks(x.size(0) * 32), 256, 0, (cudaStream_t)stream>>>(
      x.data_ptr<float>(), (const long*)labels.data_ptr<int64_t>(), loss.data_ptr<float>(),
      (int)x.size(0), (int)x.size(1));
  return loss;
}
torch::Tensor linear_backward(torch::Tensor g, torch::Tensor x, torch::Tensor w, torch::Tensor dw,
    torch::Tensor db, int64_t stream) {
  auto dx = torch::empty_like(x);
  const int rows = (int)x.size(0), in = (int)x.size(1), out = (int)w.size(0);
  grad_input_kernel<<<rows, 64, 0, (cudaStream_t)stream>>>(g.data_ptr<float>(), w.data_ptr<float>(),
      dx.data_ptr<float>(), out, in);
  grad_weight_kernel<<<out, 64, 0, (cudaStream_t)stream>>>(g.data_ptr<float>(), x.data_ptr<float>(),
      dw.data_ptr<float>(), db.data_ptr<float>(), rows, out, in);
  return dx;
}
