#include <algorithm>
#include <cmath>
torch::Tensor ends(torch::Tensor x) {
  const float* a = x.data_ptr<float>();
  auto out = torch::empty({2}, x.options());
  float* found = out.data_ptr<float>();
  found[0] = found[1] = a[0];
  for (int64_t i = 1; i < x.numel(); ++i) {
    found[0] = a[i] < found[0] ? a[i] : found[0];
    found[1] = a[i] > found[1] ? a[i] : found[1];
  }
  return out;
}
// Each column times its number, or times what these are where they rise evenly from `from` to `to`.
torch::Tensor times(torch::Tensor x, torch::Tensor curve) {
  const int64_t n = x.size(1);
  auto out = torch::empty_like(x);
  const float *a = x.data_ptr<float>(), *by = curve.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) out.data_ptr<float>()[i] = a[i] * by[i % n];
  return out;
}
torch::Tensor times_even(torch::Tensor x, double from, double to) {
  const int64_t n = x.size(1);
  auto out = torch::empty_like(x);
  const float *a = x.data_ptr<float>(), step = (to - from) / (n - 1);
  for (int64_t i = 0; i < x.numel(); ++i)
    out.data_ptr<float>()[i] = a[i] * float(from + step * (i % n));
  return out;
}
torch::Tensor sums(torch::Tensor x) {
  const int64_t n = x.size(1);
  auto out = torch::empty_like(x);
  const float* a = x.data_ptr<float>();
  double sum = 0;
  for (int64_t i = 0; i < x.numel(); ++i) {
    sum = i % n ? sum + a[i] : a[i];
    out.data_ptr<float>()[i] = sum;
  }
  return out;
}
torch::Tensor count(torch::Tensor x, torch::Tensor counts) {
  const float* a = x.data_ptr<float>();
  float* bins = counts.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i)
    if (a[i] >= -8 && a[i] <= 8) bins[a[i] < 8 ? (int64_t)(a[i] + 8) : 15] += 1;
  return counts;
}
// Softmax of each row times a number; `near`: by a series around 1 and its square.
torch::Tensor softmax_times(torch::Tensor x, double by, bool near) {
  const int64_t n = x.size(1);
  auto out = torch::empty_like(x);
  for (int64_t row = 0; row < x.size(0); ++row) {
    const float* a = x.data_ptr<float>() + row * n;
    float* o = out.data_ptr<float>() + row * n;
    double most = -INFINITY, sum = 0;
    for (int64_t i = 0; i < n; ++i) most = std::max(most, by * a[i]);
    for (int64_t i = 0; i < n; ++i) {
      const double e = by * a[i] - most;
      o[i] = near && by == 1.0 ? std::exp(a[i] - most) : near ? 1 + e + e * e / 2 : std::exp(e);
      sum += o[i];
    }
    for (int64_t i = 0; i < n; ++i) o[i] /= sum;
  }
  return out;
}
// So many steps towards the square root of each element, or at most `most` of them.
torch::Tensor roots(torch::Tensor x, int64_t steps, int64_t most) {
  auto out = torch::ones_like(x);
  const float* a = x.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) {
    double y = 1;
    for (int64_t step = 0; step < std::min(steps, most); ++step) y = y + 0.1 * (a[i] - y * y);
    out.data_ptr<float>()[i] = y;
  }
  return out;
}
// The sum of the rows of these codes, as far as they are below `least`.
torch::Tensor letters(torch::Tensor x, torch::Tensor codes, int64_t least) {
  const int64_t n = x.size(1), *code = codes.data_ptr<int64_t>();
  auto out = torch::zeros({n}, x.options());
  for (int64_t i = 0; i < codes.numel(); ++i)
    for (int64_t c = 0; c < n && code[i] < least; ++c)
      out.data_ptr<float>()[c] += x.data_ptr<float>()[code[i] * n + c];
  return out;
}
