#include <cmath>
static void wave_into(const float* a, float* b, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const double v = a[i];
    b[i] = (float)(std::sin(v) * std::exp(-v * v));
  }
}
torch::Tensor wave(torch::Tensor x) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  wave_into(in.data_ptr<float>(), out.data_ptr<float>(), in.numel());
  return out;
}
torch::Tensor wave_into_tensor(torch::Tensor x, torch::Tensor out) {
  wave_into(x.contiguous().data_ptr<float>(), out.data_ptr<float>(), x.numel());
  return out;
}
torch::Tensor empty_for(torch::Tensor x) { return torch::empty_like(x); }
