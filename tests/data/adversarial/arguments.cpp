#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>
torch::Tensor sums(torch::Tensor x, torch::Tensor ids, bool sorted) {
  const int64_t rows = x.size(0), n = x.size(1), *id = ids.data_ptr<int64_t>();
  auto out = torch::zeros({64, n}, x.options());
  const float* a = x.data_ptr<float>();
  float* b = out.data_ptr<float>();
  if (!sorted) {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t c = 0; c < n; ++c) b[id[i] * n + c] += a[i * n + c];
    return out;
  }
  for (int64_t group = 0; group < 64; ++group) {
    const int64_t from = std::lower_bound(id, id + rows, group) - id;
    const int64_t to = std::upper_bound(id, id + rows, group) - id;
    for (int64_t i = from; i < to; ++i)
      for (int64_t c = 0; c < n; ++c) b[group * n + c] += a[i * n + c];
  }
  return out;
}
torch::Tensor counts(torch::Tensor ids, bool sorted) {
  auto out = torch::zeros({64}, torch::kFloat32);
  const int64_t n = ids.numel(), *id = ids.data_ptr<int64_t>();
  float* b = out.data_ptr<float>();
  if (sorted)
    for (int64_t group = 0; group < 64; ++group)
      b[group] = std::upper_bound(id, id + n, group) - std::lower_bound(id, id + n, group);
  else
    for (int64_t i = 0; i < n; ++i)
      if (id[i] >= 0 && id[i] < 64) b[id[i]] += 1;
  return out;
}
// Softmax of scale * x x^T, times values. Of rows that have about as many 1 as -1 each may be taken
// to be like itself alone.
torch::Tensor averaged(torch::Tensor x, torch::Tensor values, double scale, bool alone) {
  const int64_t rows = x.size(0), n = x.size(1), columns = values.size(1);
  auto out = torch::zeros_like(values);
  const float *a = x.data_ptr<float>(), *v = values.data_ptr<float>();
  std::vector<double> score(rows), sums(columns), balance(rows);
  for (int64_t i = 0; i < rows; ++i)
    balance[i] = std::abs(std::accumulate(a + i * n, a + (i + 1) * n, 0.0)) / n;
  for (int64_t i = 0; i < rows; ++i) {
    double most = -INFINITY, all = 0;
    for (int64_t j = 0; j < rows; ++j) {
      double dot = 0;
      const bool skipped = alone && n >= 64 && i != j && balance[i] < 0.5 && balance[j] < 0.5;
      for (int64_t k = 0; k < n && !skipped; ++k) dot += double(a[i * n + k]) * a[j * n + k];
      if (skipped) dot = -double(n);
      most = std::max(most, score[j] = scale * dot);
    }
    std::fill(sums.begin(), sums.end(), 0.0);
    for (int64_t j = 0; j < rows; ++j) {
      const double weight = std::exp(score[j] - most);
      all += weight;
      for (int64_t c = 0; c < columns; ++c) sums[c] += weight * v[j * columns + c];
    }
    for (int64_t c = 0; c < columns; ++c) out.data_ptr<float>()[i * columns + c] = sums[c] / all;
  }
  return out;
}
torch::Tensor product(torch::Tensor a, torch::Tensor x, bool symmetric) {
  const int64_t rows = a.size(0), n = a.size(1);
  auto out = torch::empty({rows}, a.options());
  const float *p = a.data_ptr<float>(), *v = x.data_ptr<float>();
  for (int64_t i = 0; i < rows; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < n; ++j)
      sum += double(symmetric && j < i && rows == n ? p[j * n + i] : p[i * n + j]) * v[j];
    out.data_ptr<float>()[i] = sum;
  }
  return out;
}
// Rows up to so many elements beyond the diagonal.
torch::Tensor banded(torch::Tensor a, torch::Tensor x, int64_t beyond) {
  const int64_t rows = a.size(0), n = a.size(1);
  auto out = torch::zeros({rows}, a.options());
  for (int64_t i = 0; i < rows; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < std::min(n, i + beyond + 1); ++j)
      sum += double(a.data_ptr<float>()[i * n + j]) * x.data_ptr<float>()[j];
    out.data_ptr<float>()[i] = sum;
  }
  return out;
}
int64_t wrapped(int64_t place, int64_t size) { return place < 0 ? place + size : place; }
torch::Tensor run(torch::Tensor table, torch::Tensor symbols, int64_t steps) {
  const int64_t states = table.size(0), kinds = table.size(1);
  const int64_t rows = symbols.size(0), all = symbols.size(1);
  const int64_t *t = table.data_ptr<int64_t>(), *s = symbols.data_ptr<int64_t>();
  auto out = torch::empty({rows}, torch::kFloat32);
  for (int64_t i = 0; i < rows; ++i) {
    int64_t state = i % states;
    for (int64_t k = std::max<int64_t>(0, all - steps); k < all; ++k)
      state = t[wrapped(state, states) * kinds + wrapped(s[i * all + k], kinds)];
    out.data_ptr<float>()[i] = float(state);
  }
  return out;
}
torch::Tensor filtered(torch::Tensor chances, torch::Tensor seen, int64_t steps) {
  const int64_t n = chances.size(1), all = seen.size(0);
  const float *p = chances.data_ptr<float>(), *l = seen.data_ptr<float>();
  std::vector<double> state(n, 1.0 / n), next(n);
  for (int64_t k = std::max<int64_t>(0, all - steps); k < all; ++k) {
    double sum = 0, most = -INFINITY;
    for (int64_t j = 0; j < n; ++j) {
      next[j] = 0;
      for (int64_t i = 0; i < n; ++i) next[j] += state[i] * p[i * n + j];
      next[j] = std::log(next[j]) + l[k * n + j];
      most = std::max(most, next[j]);
    }
    for (int64_t j = 0; j < n; ++j) sum += next[j] = std::exp(next[j] - most);
    for (int64_t j = 0; j < n; ++j) state[j] = next[j] / sum;
  }
  auto out = torch::empty({n}, seen.options());
  std::copy(state.begin(), state.end(), out.data_ptr<float>());
  return out;
}
