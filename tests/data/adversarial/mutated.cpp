#include <algorithm>
#include <cmath>
#include <vector>
torch::Tensor mean_of_largest(torch::Tensor x, int64_t k) {
  const int64_t rows = x.size(0), n = x.size(1);
  auto out = torch::empty({rows}, x.options());
  for (int64_t i = 0; i < rows; ++i) {
    std::vector<float> row(x.data_ptr<float>() + i * n, x.data_ptr<float>() + (i + 1) * n);
    std::partial_sort(row.begin(), row.begin() + k, row.end(), std::greater<float>());
    double sum = 0;
    for (int64_t j = 0; j < k; ++j) sum += row[j];
    out.data_ptr<float>()[i] = float(sum / k);
  }
  return out;
}
torch::Tensor largest_of_segments(torch::Tensor x, torch::Tensor lengths) {
  auto out = torch::empty(lengths.sizes(), x.options());
  const float* a = x.data_ptr<float>();
  for (int64_t i = 0; i < lengths.numel(); ++i) {
    float most = -INFINITY;
    for (int64_t j = 0; j < lengths.data_ptr<int64_t>()[i]; ++j) most = std::max(most, *a++);
    out.data_ptr<float>()[i] = most;
  }
  return out;
}
torch::Tensor repeated(torch::Tensor x, torch::Tensor repeats) {
  const int64_t rows = x.size(0), n = x.size(1), *counts = repeats.data_ptr<int64_t>();
  int64_t all = 0;
  for (int64_t i = 0; i < rows; ++i) all += counts[i];
  auto out = torch::empty({all, n}, x.options());
  float* b = out.data_ptr<float>();
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t c = 0; c < counts[i]; ++c, b += n) std::copy_n(x.data_ptr<float>() + i * n, n, b);
  return out;
}
// A sparse matrix, of given places or of a band of three, times a vector.
torch::Tensor product(torch::Tensor places, torch::Tensor values, torch::Tensor x, bool band) {
  const int64_t count = values.numel(), rows = band ? count / 3 : 64;
  const int64_t* at = places.data_ptr<int64_t>();
  std::vector<double> sums(rows);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = band ? i / 3 : at[i], column = band ? i / 3 + i % 3 : at[count + i];
    sums[row] += double(values.data_ptr<float>()[i]) * x.data_ptr<float>()[column];
  }
  auto out = torch::empty({rows}, x.options());
  std::copy(sums.begin(), sums.end(), out.data_ptr<float>());
  return out;
}
// How far the nearest set element of a row is, up to a radius.
torch::Tensor nearest(torch::Tensor mask, int64_t radius) {
  const int64_t rows = mask.size(0), n = mask.size(1);
  auto out = torch::full({rows, n}, 1000.0f);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < n; ++j)
      for (int64_t k = std::max<int64_t>(0, j - radius); k < std::min(n, j + radius + 1); ++k)
        if (mask.data_ptr<bool>()[i * n + k]) {
          float& best = out.data_ptr<float>()[i * n + j];
          best = std::min(best, float(std::abs(j - k)));
        }
  return out;
}
torch::Tensor walked(torch::Tensor x, torch::Tensor scores, int64_t squarings) {
  const int64_t n = scores.size(1);
  std::vector<double> p(n * n), q(n * n);
  for (int64_t i = 0; i < n; ++i) {
    const float* a = scores.data_ptr<float>() + i * n;
    const double most = *std::max_element(a, a + n);
    double sum = 0;
    for (int64_t j = 0; j < n; ++j) sum += p[i * n + j] = std::exp(a[j] - most);
    for (int64_t j = 0; j < n; ++j) p[i * n + j] /= sum;
  }
  for (int64_t s = 0; s < squarings; ++s) {
    std::fill(q.begin(), q.end(), 0.0);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t k = 0; k < n; ++k)
        for (int64_t j = 0; j < n; ++j) q[i * n + j] += p[i * n + k] * p[k * n + j];
    p.swap(q);
  }
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.size(0); ++i)
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < n; ++k) sum += x.data_ptr<float>()[i * n + k] * p[k * n + j];
      out.data_ptr<float>()[i * n + j] = float(sum);
    }
  return out;
}
torch::Tensor matches(torch::Tensor x, torch::Tensor y, bool narrow) {
  auto out = torch::zeros_like(x);
  for (int64_t i = 0; i < x.numel(); ++i)
    for (int64_t j = 0; j < y.numel(); ++j) {
      const int64_t a = x.data_ptr<int64_t>()[i], b = y.data_ptr<int64_t>()[j];
      out.data_ptr<int64_t>()[i] += narrow ? int16_t(a) == int16_t(b) : a == b;
    }
  return out;
}
