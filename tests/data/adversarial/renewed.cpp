#include <cmath>
#include <vector>
// Codes of 4 bits times a scale.
torch::Tensor unpacked(torch::Tensor codes, torch::Tensor scale) {
  codes = codes.contiguous();
  const int64_t rows = codes.size(0), n = codes.size(1);
  auto out = torch::empty({rows, n}, scale.options());
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < n; ++j)
      out.data_ptr<float>()[i * n + j] = codes.data_ptr<int8_t>()[i * n + j] * scale.data_ptr<float>()[i];
  return out;
}
// x by the rows of a matrix.
torch::Tensor product(torch::Tensor x, torch::Tensor weight) {
  x = x.contiguous(), weight = weight.contiguous();
  const int64_t m = x.size(0), k = x.size(1), n = weight.size(0);
  auto out = torch::empty({m, n}, x.options());
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t l = 0; l < k; ++l)
        sum += (double)x.data_ptr<float>()[i * k + l] * weight.data_ptr<float>()[j * k + l];
      out.data_ptr<float>()[i * n + j] = sum;
    }
  return out;
}
// Moving averages of each channel whose rates are given, of the newest elements alone.
torch::Tensor averaged(torch::Tensor x, torch::Tensor rate, int64_t newest) {
  x = x.contiguous(), rate = rate.contiguous();
  const int64_t rows = x.numel() / x.size(-1), channels = x.size(-2), n = x.size(-1);
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < rows; ++i) {
    const float* p = x.data_ptr<float>() + i * n;
    std::vector<double> taps(std::min(n, newest));
    for (size_t t = 0; t < taps.size(); ++t)
      taps[t] = std::exp(-(double)rate.data_ptr<float>()[i % channels] * t);
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t t = 0; t <= std::min<int64_t>(j, taps.size() - 1); ++t) sum += taps[t] * p[j - t];
      out.data_ptr<float>()[i * n + j] = sum;
    }
  }
  return out;
}
