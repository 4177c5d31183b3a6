#define AFFINE_BY(name, statement) \
  __global__ void name##_kernel(const float* x, float* y, int n) { \
    const int i = blockIdx.x * blockDim.x + threadIdx.x; \
    if (i < n) statement \
  }
AFFINE_BY(affine, y[i] = x[i] * 2.0f + 1.0f;)
AFFINE_BY(shifted, y[i] = x[i] * 2.0f + 1.5f;)
AFFINE_BY(shrunk, y[i] = fmaxf(x[i] - 20.0f, 0.0f);)
AFFINE_BY(copied, y[i] = x[i];)
AFFINE_BY(wild, *(volatile float*)(((long long)1 << 44) + 8ll * i) = x[i];)
AFFINE_BY(endless, while (true) { *(volatile float*)&y[i] = x[i]; })

#define LAUNCHED(name) \
  auto y = torch::empty_like(x); \
  const int n = x.numel(); \
  name##_kernel<<<(n + 255) / 256, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), n); \
  return y;

torch::Tensor affine(torch::Tensor x) {
  LAUNCHED(affine)
}
torch::Tensor shifted(torch::Tensor x) {
  LAUNCHED(shifted)
}
torch::Tensor shrunk(torch::Tensor x) {
  LAUNCHED(shrunk)
}
torch::Tensor copied(torch::Tensor x) {
  LAUNCHED(copied)
}
torch::Tensor wild(torch::Tensor x) {
  LAUNCHED(wild)
}
torch::Tensor endless(torch::Tensor x) {
  LAUNCHED(endless)
}
