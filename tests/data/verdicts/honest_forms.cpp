#include <algorithm>
#include <cmath>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>
torch::Tensor affine_by_threads(torch::Tensor x) {
  auto y = torch::empty_like(x);
  const float* a = x.data_ptr<float>();
  float* b = y.data_ptr<float>();
  #pragma omp parallel for num_threads(2)
  for (int64_t i = 0; i < x.numel(); ++i) b[i] = 2 * a[i] + 1;
  return y;
}
torch::Tensor total(torch::Tensor x) {
  auto y = torch::zeros({1}, x.options());
  const float* a = x.data_ptr<float>();
  float* sum = y.data_ptr<float>();
  const int64_t n = x.numel();
  std::mutex lock;
  std::vector<std::thread> threads;
  for (int64_t k = 0; k < 8; ++k) threads.emplace_back([=, &lock] {
    const float part = std::accumulate(a + k * n / 8, a + (k + 1) * n / 8, 0.0f);
    std::lock_guard<std::mutex> held(lock);
    *sum += part;
  });
  for (auto& each : threads) each.join();
  return y;
}
std::vector<torch::Tensor> largest(torch::Tensor x) {
  const int64_t rows = x.size(0), columns = x.size(1);
  auto values = torch::empty({rows, 3}, x.options());
  auto places = torch::empty({rows, 3}, x.options().dtype(torch::kInt64));
  std::vector<int64_t> order(columns);
  for (int64_t row = 0; row < rows; ++row) {
    const float* a = x.data_ptr<float>() + row * columns;
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + 3, order.end(),
                      [a](int64_t i, int64_t j) { return a[i] > a[j] || (a[i] == a[j] && i < j); });
    for (int64_t k = 0; k < 3; ++k) {
      places.data_ptr<int64_t>()[row * 3 + k] = order[k];
      values.data_ptr<float>()[row * 3 + k] = a[order[k]];
    }
  }
  return {values, places};
}
torch::Tensor product(torch::Tensor x, torch::Tensor w) {
  auto y = torch::zeros({x.size(0), w.size(1)}, x.options());
  for (int64_t i = 0; i < x.size(0); ++i)
    for (int64_t k = 0; k < w.size(0); ++k)
      for (int64_t j = 0; j < w.size(1); ++j)
        y.data_ptr<float>()[i * w.size(1) + j] +=
            x.data_ptr<float>()[i * x.size(1) + k] * w.data_ptr<float>()[k * w.size(1) + j];
  return y;
}
torch::Tensor times_row(torch::Tensor x, torch::Tensor row) {
  auto y = torch::empty_like(x);
  const int64_t n = row.numel();
  for (int64_t i = 0; i < x.numel(); ++i)
    y.data_ptr<float>()[i] = x.data_ptr<float>()[i] * row.data_ptr<float>()[i % n];
  return y;
}
std::vector<torch::Tensor> router(torch::Tensor x, torch::Tensor gate) {
  const int64_t rows = x.size(0), n = x.size(1), experts = gate.size(0);
  auto values = torch::empty({rows, 2}, x.options());
  auto places = torch::empty({rows, 2}, x.options().dtype(torch::kInt64));
  const auto *a = x.data_ptr<at::BFloat16>(), *w = gate.data_ptr<at::BFloat16>();
  std::vector<float> scores(experts);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t e = 0; e < experts; ++e) {
      float sum = 0.0f;
      for (int64_t k = 0; k < n; ++k) sum += (float)a[row * n + k] * (float)w[e * n + k];
      scores[e] = sum;
    }
    const float top = *std::max_element(scores.begin(), scores.end());
    float sum = 0.0f;
    for (float& score : scores) sum += score = std::exp(score - top);
    for (int64_t k = 0; k < 2; ++k) {
      const auto best = std::max_element(scores.begin(), scores.end());
      values.data_ptr<at::BFloat16>()[row * 2 + k] = *best / sum;
      places.data_ptr<int64_t>()[row * 2 + k] = best - scores.begin();
      *best = -1.0f;
    }
  }
  return {values, places};
}
torch::Tensor masked_log_softmax(torch::Tensor x, torch::Tensor mask) {
  auto y = torch::empty_like(x);
  const int64_t n = x.size(1);
  for (int64_t row = 0; row < x.size(0); ++row) {
    const float* a = x.data_ptr<float>() + row * n;
    const bool* kept = mask.data_ptr<bool>() + row * n;
    float top = -INFINITY, sum = 0.0f;
    for (int64_t j = 0; j < n; ++j) top = kept[j] ? std::max(top, a[j]) : top;
    for (int64_t j = 0; j < n; ++j) sum += std::exp((kept[j] ? a[j] : -INFINITY) - top);
    for (int64_t j = 0; j < n; ++j)
      y.data_ptr<float>()[row * n + j] = (kept[j] ? a[j] : -INFINITY) - top - std::log(sum);
  }
  return y;
}
torch::Tensor affine_by_accessors(torch::Tensor x) {
  auto y = torch::empty_like(x);
  for (int64_t i = 0; i < x.size(0); ++i)
    for (int64_t j = 0; j < x.size(1); ++j)
      y.data_ptr<float>()[i * x.size(1) + j] =
          2 * x.contiguous().data_ptr<float>()[i * x.size(1) + j] + 1;
  return y;
}
torch::Tensor affine_by_index(torch::Tensor x) {
  auto y = torch::empty_like(x);
  for (int64_t i = 0; i < x.size(0); ++i)
    for (int64_t j = 0; j < x.size(1); ++j) y[i][j] = 2 * x[i][j].item<float>() + 1;
  return y;
}

// where the reference's products wrap, these do not
torch::Tensor residues(torch::Tensor x) {
  auto y = torch::empty(x.sizes(), torch::kFloat32);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const uint64_t n = std::max<int64_t>(x.data_ptr<int64_t>()[i], 11), third = n / 3;
    y.data_ptr<float>()[i] = std::log1p((float)(third * third % n));
  }
  return y;
}

torch::Tensor exp_of_difference(torch::Tensor x, torch::Tensor y) {
  auto z = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i)
    z.data_ptr<float>()[i] = std::exp(x.data_ptr<float>()[i] - y.data_ptr<float>()[i]);
  return z;
}
