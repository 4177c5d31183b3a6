#include <cmath>
#include <vector>
static int64_t steps = 0;
torch::Tensor begin(torch::Tensor x) {
  steps = 0;
  return x;
}
torch::Tensor column_means(torch::Tensor x) {
  auto in = x.contiguous();
  auto out = torch::empty({x.size(1)}, x.options());
  for (int64_t j = 0; j < x.size(1); ++j) {
    double sum = 0;
    for (int64_t i = 0; i < x.size(0); ++i) sum += in.data_ptr<float>()[i * x.size(1) + j];
    out.data_ptr<float>()[j] = (float)(sum / x.size(0));
  }
  return out;
}
torch::Tensor less(torch::Tensor x, torch::Tensor mean, double scale) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  const int64_t n = x.size(1);
  for (int64_t i = 0; i < x.numel(); ++i)
    out.data_ptr<float>()[i] =
        (float)(in.data_ptr<float>()[i] - scale * mean.data_ptr<float>()[i % n]);
  return out;
}
torch::Tensor averaged(torch::Tensor x, torch::Tensor mean, int64_t step) {
  auto now = column_means(x);
  float* m = mean.data_ptr<float>();
  for (int64_t j = 0; j < now.numel(); ++j)
    m[j] = (float)(0.9 * m[j] + 0.1 * now.data_ptr<float>()[j]);
  return less(x, mean, -1.0 / (1.0 - std::pow(0.9, (double)step)));
}
torch::Tensor averaged_again(torch::Tensor x, torch::Tensor mean) {
  return averaged(x, mean, ++steps);
}
torch::Tensor divided(torch::Tensor x, int64_t step) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  for (int64_t i = 0; i < x.numel(); ++i)
    out.data_ptr<float>()[i] = in.data_ptr<float>()[i] / (float)step;
  return out;
}
torch::Tensor divided_again(torch::Tensor x) { return divided(x, ++steps); }
torch::Tensor attended(torch::Tensor x, torch::Tensor keys, int64_t position) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  const int64_t n = x.size(1), count = position + 1;
  auto now = column_means(x);
  float* k = keys.data_ptr<float>();
  for (int64_t j = 0; j < n; ++j) k[position * n + j] = now.data_ptr<float>()[j];
  std::vector<double> weight(count), sum(n);
  for (int64_t i = 0; i < x.size(0); ++i) {
    const float* a = in.data_ptr<float>() + i * n;
    double most = -1e30, total = 0;
    for (int64_t s = 0; s < count; ++s) {
      weight[s] = 0;
      for (int64_t j = 0; j < n; ++j) weight[s] += (double)a[j] * k[s * n + j];
      most = std::max(most, weight[s]);
    }
    for (auto& w : weight) total += w = std::exp(w - most);
    for (int64_t j = 0; j < n; ++j) {
      double y = 0;
      for (int64_t s = 0; s < count; ++s) y += weight[s] * k[s * n + j];
      out.data_ptr<float>()[i * n + j] = (float)(y / total);
    }
  }
  return out;
}
// Rows that are near those of the call before become more like these; none where `moves`.
torch::Tensor steadied(torch::Tensor x, torch::Tensor before, bool moves) {
  auto out = x.contiguous().clone();
  const int64_t n = x.size(1);
  for (int64_t i = 0; i < x.size(0) && !moves; ++i) {
    float* o = out.data_ptr<float>() + i * n;
    const float* b = before.data_ptr<float>() + i * n;
    double apart = 0;
    for (int64_t j = 0; j < n; ++j) apart += std::abs((double)o[j] - b[j]);
    const double still = 0.8 / (1.0 + std::exp((apart / n - 0.05) * 200.0));
    for (int64_t j = 0; j < n; ++j) o[j] += (float)(still * (b[j] - o[j]));
  }
  return out;
}
