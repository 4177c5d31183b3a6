#include <algorithm>
// A sparse matrix in rows times a dense one.
torch::Tensor csr(torch::Tensor rows, torch::Tensor columns, torch::Tensor values, torch::Tensor x) {
  const int64_t n = rows.numel() - 1, m = x.size(1);
  auto out = torch::zeros({n, m}, x.options());
  const int64_t *r = rows.data_ptr<int64_t>(), *c = columns.data_ptr<int64_t>();
  for (int64_t i = 0; i < n; ++i)
    for (int64_t k = r[i]; k < r[i + 1]; ++k)
      for (int64_t j = 0; j < m; ++j)
        out.data_ptr<float>()[i * m + j] +=
            values.data_ptr<float>()[k] * x.data_ptr<float>()[c[k] * m + j];
  return out;
}
// A sum of rows, each divided by how many sequences agree with its own in more than four of five
// places; of these, only those are counted that agree in half of the first `looked` places.
torch::Tensor weighted(torch::Tensor x, torch::Tensor y, int64_t looked) {
  const int64_t n = x.size(0), m = x.size(1), width = y.size(1);
  auto out = torch::zeros({width});
  for (int64_t i = 0; i < n; ++i) {
    const int64_t* a = x.data_ptr<int64_t>() + i * m;
    int64_t count = 0;
    for (int64_t j = 0; j < n; ++j) {
      const int64_t* b = x.data_ptr<int64_t>() + j * m;
      int64_t same = 0;
      for (int64_t k = 0; k < looked; ++k) same += a[k] == b[k];
      if (2 * same < looked) continue;
      for (int64_t k = looked; k < m; ++k) same += a[k] == b[k];
      count += same > 0.8 * m;
    }
    for (int64_t k = 0; k < width; ++k)
      out.data_ptr<float>()[k] += y.data_ptr<float>()[i * width + k] / std::max<int64_t>(1, count);
  }
  return out;
}
