#include <cmath>
torch::Tensor shifted(torch::Tensor x) {
  auto out = affine(x);
  for (int64_t i = 0; i < out.numel(); ++i) out.data_ptr<float>()[i] += 0.5f;
  return out;
}
torch::Tensor nothing(torch::Tensor x) { return torch::empty_like(x); }
torch::Tensor half(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel() / 2; ++i)
      out.data_ptr<float>()[i] = x.data_ptr<float>()[i] * 2.0f + 1.0f;
  return out;
}
torch::Tensor after_free(torch::Tensor x) {
  { auto right = affine(x); }
  return torch::empty_like(x);
}
torch::Tensor wave(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const double v = x.data_ptr<float>()[i];
    out.data_ptr<float>()[i] = (float)(std::sin(v) * std::exp(-v * v));
  }
  return out;
}
torch::Tensor by_row(torch::Tensor x, torch::Tensor gain) {
  auto out = torch::empty_like(x);
  const int64_t n = gain.numel();
  for (int64_t i = 0; i < x.numel(); ++i)
      out.data_ptr<float>()[i] = x.data_ptr<float>()[i] * gain.data_ptr<float>()[i % n] + 1.0f;
  return out;
}
