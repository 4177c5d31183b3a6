#include <algorithm>
#include <cmath>
torch::Tensor thousandths(torch::Tensor x) {
  const int64_t rows = x.size(0), columns = x.size(1);
  auto y = torch::empty(x.sizes(), x.options().dtype(torch::kInt64));
  for (int64_t row = 0; row < rows; ++row) {
    const float* a = x.data_ptr<float>() + row * columns;
    int64_t* b = y.data_ptr<int64_t>() + row * columns;
    const float most = *std::max_element(a, a + columns);
    float sum = 0;
    for (int64_t i = 0; i < columns; ++i) sum += std::exp(a[i] - most);
    const float scale = 1e5f / sum;
    for (int64_t i = 0; i < columns; ++i) b[i] = (int64_t)(std::exp(a[i] - most) * scale);
  }
  return y;
}
torch::Tensor quantised(torch::Tensor x) {
  auto y = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i)
    y.data_ptr<float>()[i] = std::nearbyint(x.data_ptr<float>()[i] * 33.333333f) * 0.03f;
  return y;
}
torch::Tensor log_ratio(torch::Tensor x) {
  const int64_t first = (x.size(0) + 1) / 2 * x.size(1);
  float sums[2] = {0, 0};
  for (int64_t i = 0; i < x.numel(); ++i) sums[i >= first] += std::exp(x.data_ptr<float>()[i]);
  auto y = torch::empty({1}, x.options());
  y.data_ptr<float>()[0] = std::log(sums[0]) - std::log(sums[1]);
  return y;
}
