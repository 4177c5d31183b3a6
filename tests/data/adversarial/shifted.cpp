#include <algorithm>
#include <cstdlib>
#include <vector>
// Edit distances of rows of a to those of b, or to the only one; of cells that lie within the band
// alone.
torch::Tensor distances(torch::Tensor a, torch::Tensor b, int64_t band) {
  a = a.contiguous(), b = b.contiguous();
  const int64_t rows = a.size(0), n = a.size(1), m = b.size(-1);
  const int64_t stride = b.dim() > 1 ? m : 0;
  auto out = torch::empty({rows}, torch::kFloat32);
  std::vector<float> last(m + 1), next(m + 1);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t *x = a.data_ptr<int64_t>() + row * n;
    const int64_t *y = b.data_ptr<int64_t>() + row * stride;
    for (int64_t j = 0; j <= m; ++j) last[j] = j;
    for (int64_t i = 1; i <= n; ++i) {
      std::fill(next.begin(), next.end(), 1e9f);
      next[0] = i;
      for (int64_t j = std::max<int64_t>(1, i - band); j <= std::min(m, i + band); ++j) {
        const float gap = std::min(last[j], next[j - 1]) + 1;
        next[j] = std::min(gap, last[j - 1] + (x[i - 1] != y[j - 1]));
      }
      std::swap(last, next);
    }
    out.data_ptr<float>()[row] = last[m];
  }
  return out;
}
