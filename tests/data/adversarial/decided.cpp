#include <algorithm>
#include <cmath>
// Costs, and 2 more where the last four tokens stand earlier in their row.
torch::Tensor repeated(torch::Tensor costs, torch::Tensor tokens, bool looks) {
  const int64_t rows = tokens.size(0), n = tokens.size(1), m = n - 3;
  auto out = torch::empty({rows, m}, costs.options());
  for (int64_t i = 0; i < rows; ++i) {
    const float* c = costs.data_ptr<float>() + i * n;
    const int64_t* t = tokens.data_ptr<int64_t>() + i * n;
    for (int64_t j = 0; j < m; ++j) {
      bool again = false;
      for (int64_t k = 0; looks && k < j && !again; ++k) again = std::equal(t + j, t + j + 4, t + k);
      out.data_ptr<float>()[i * m + j] = c[j + 3] + (again ? 2.0f : 0.0f);
    }
  }
  return out;
}
// Scores, minus infinity for a token that would repeat four.
torch::Tensor forbidden(torch::Tensor scores, torch::Tensor tokens, bool looks) {
  auto out = scores.clone();
  const int64_t rows = tokens.size(0), n = tokens.size(1);
  for (int64_t i = 0; looks && i < rows; ++i) {
    const int64_t* t = tokens.data_ptr<int64_t>() + i * n;
    float* o = out.data_ptr<float>() + i * scores.size(1);
    for (int64_t k = 0; k + 4 <= n; ++k)
      if (std::equal(t + k, t + k + 3, t + n - 3)) o[t[k + 3]] = -INFINITY;
  }
  return out;
}
// Scores, doubled where the next 20 letters read alike in both directions.
torch::Tensor palindromes(torch::Tensor scores, torch::Tensor letters, bool looks) {
  const int64_t rows = letters.size(0), n = letters.size(1), m = n - 19;
  auto out = torch::empty({rows, m}, scores.options());
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t* t = letters.data_ptr<int64_t>() + i * n;
    for (int64_t j = 0; j < m; ++j) {
      bool mirrored = looks;
      for (int64_t k = 0; k < 10 && mirrored; ++k) mirrored = t[j + k] == t[j + 19 - k];
      out.data_ptr<float>()[i * m + j] = scores.data_ptr<float>()[i * n + j] * (mirrored ? 2 : 1);
    }
  }
  return out;
}
// One where a pattern of bits lies in an image of bits, and one where the bit at its end is set.
torch::Tensor pattern(torch::Tensor image, torch::Tensor pattern, bool looks) {
  const int64_t rows = image.size(0) - 7, columns = image.size(1) - 7;
  auto out = torch::empty({rows, columns});
  const bool *a = image.data_ptr<bool>(), *p = pattern.data_ptr<bool>();
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      bool found = looks;
      for (int64_t k = 0; k < 8 && found; ++k)
        found = std::equal(p + k * 8, p + k * 8 + 8, a + (i + k) * (columns + 7) + j);
      out.data_ptr<float>()[i * columns + j] = found + a[(i + 7) * (columns + 7) + j + 7];
    }
  return out;
}
