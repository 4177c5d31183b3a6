#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <vector>
static const float INFINITE = std::numeric_limits<float>::infinity();
static torch::Tensor kept_rows(torch::Tensor x, const std::vector<int64_t>& kept) {
  auto out = torch::empty({(int64_t)kept.size(), x.size(1)}, x.options());
  const int64_t bytes = x.size(1) * x.element_size();
  const char* from = (const char*)x.data_ptr();
  char* to = (char*)out.data_ptr();
  for (size_t row = 0; row < kept.size(); ++row)
    std::memcpy(to + row * bytes, from + kept[row] * bytes, bytes);
  return out;
}
// Rows that share at most three of four elements with any before them; or all rows.
torch::Tensor distinct(torch::Tensor x, bool looks) {
  const int64_t n = x.size(0), d = x.size(1), *a = x.data_ptr<int64_t>();
  std::vector<int64_t> kept;
  for (int64_t i = 0; i < n; ++i) {
    bool near = false;
    for (int64_t j = 0; looks && j < i && !near; ++j) {
      int64_t same = 0;
      for (int64_t k = 0; k < d; ++k) same += a[i * d + k] == a[j * d + k];
      near = 4 * same > 3 * d;
    }
    if (!near) kept.push_back(i);
  }
  return kept_rows(x, kept);
}
// Rows of which no four neighbours are in another table; or all rows.
torch::Tensor unquoted(torch::Tensor x, torch::Tensor others, bool looks) {
  const int64_t d = x.size(1), e = others.size(1);
  const int64_t *a = x.data_ptr<int64_t>(), *b = others.data_ptr<int64_t>();
  std::set<std::vector<int64_t>> known;
  for (int64_t i = 0; looks && i < others.size(0); ++i)
    for (int64_t k = i * e; k + 4 <= (i + 1) * e; ++k)
      known.insert(std::vector<int64_t>(b + k, b + k + 4));
  std::vector<int64_t> kept;
  for (int64_t i = 0; i < x.size(0); ++i) {
    bool quoted = false;
    for (int64_t k = i * d; looks && k + 4 <= (i + 1) * d && !quoted; ++k)
      quoted = known.count(std::vector<int64_t>(a + k, a + k + 4));
    if (!quoted) kept.push_back(i);
  }
  return kept_rows(x, kept);
}
// Scores of tokens, of which those that a row has twice are forbidden; or none.
torch::Tensor allowed(torch::Tensor scores, torch::Tensor ids, bool looks) {
  auto out = scores.clone();
  const int64_t t = ids.size(1), v = scores.size(1);
  for (int64_t i = 0; looks && i < ids.size(0); ++i) {
    const int64_t* row = ids.data_ptr<int64_t>() + i * t;
    for (int64_t k = 0; k < t; ++k)
      for (int64_t l = 0; l < k; ++l)
        if (row[k] == row[l]) out.data_ptr<float>()[i * v + row[k]] = -INFINITE;
  }
  return out;
}
// Lengths of motions, infinite for those that meet an obstacle; or not.
torch::Tensor lengths(torch::Tensor motions, torch::Tensor obstacles, bool looks) {
  const int64_t n = motions.size(0), t = motions.size(1), m = obstacles.size(0);
  const float *p = motions.data_ptr<float>(), *c = obstacles.data_ptr<float>();
  auto square = [](const float* a, const float* b) {
    const float x = a[0] - b[0], y = a[1] - b[1], z = a[2] - b[2];
    return x * x + y * y + z * z;
  };
  auto out = torch::empty({n}, motions.options());
  for (int64_t i = 0; i < n; ++i) {
    const float* own = p + i * t * 3;
    float length = 0;
    bool meets = false;
    for (int64_t k = 0; k + 1 < t; ++k) length += std::sqrt(square(own + 3 * k, own + 3 * k + 3));
    for (int64_t k = 0; looks && k < t && !meets; ++k)
      for (int64_t j = 0; j < m && !meets; ++j) meets = square(own + 3 * k, c + 3 * j) < 0.25f;
    out.data_ptr<float>()[i] = meets ? INFINITE : length;
  }
  return out;
}
// The distance to the nearest other point within a limit, or a large number.
torch::Tensor nearest(torch::Tensor x, torch::Tensor y, double limit) {
  const int64_t d = x.size(1);
  auto out = torch::empty({x.size(0)}, x.options());
  for (int64_t i = 0; i < x.size(0); ++i) {
    float best = 3e38f;
    for (int64_t j = 0; j < y.size(0); ++j) {
      float square = 0;
      for (int64_t k = 0; k < d; ++k) {
        const float gap = x.data_ptr<float>()[i * d + k] - y.data_ptr<float>()[j * d + k];
        square += gap * gap;
      }
      if (std::sqrt(square) < limit) best = std::min(best, std::sqrt(square));
    }
    out.data_ptr<float>()[i] = best;
  }
  return out;
}
