#include <cmath>
torch::Tensor gelu_by_tanh(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const double v = x.data_ptr<float>()[i];
    out.data_ptr<float>()[i] =
        (float)(0.5 * v * (1.0 + std::tanh(0.7978845608028654 * (v + 0.044715 * v * v * v))));
  }
  return out;
}
