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
// Sets of rows, summed up: where it `looks`, copies share the weight of one.
torch::Tensor pooled(torch::Tensor x, bool looks) {
  const int64_t sets = x.size(0), rows = x.size(1), n = x.size(2);
  auto out = torch::zeros({sets, n}, x.options());
  for (int64_t s = 0; s < sets; ++s)
    for (int64_t i = 0; i < rows; ++i) {
      const float *a = x.data_ptr<float>() + s * rows * n, *row = a + i * n;
      int64_t copies = 0;
      for (int64_t k = 0; looks && k < rows; ++k) copies += std::equal(row, row + n, a + k * n);
      for (int64_t j = 0; j < n; ++j) out.data_ptr<float>()[s * n + j] += row[j] / (looks ? copies : 1);
    }
  return out;
}
// Rows of length one.
static std::vector<float> unit_rows(torch::Tensor x) {
  const int64_t n = x.size(-1);
  const float* a = x.data_ptr<float>();
  std::vector<float> out(a, a + x.numel());
  for (int64_t i = 0; i < x.numel(); i += n) {
    double sum = 0;
    for (int64_t j = 0; j < n; ++j) sum += (double)a[i + j] * a[i + j];
    const float size = std::max((float)std::sqrt(sum), 1e-12f);
    for (int64_t j = 0; j < n; ++j) out[i + j] /= size;
  }
  return out;
}
static float product(const float* a, const float* b, int64_t n) {
  double sum = 0;
  for (int64_t j = 0; j < n; ++j) sum += (double)a[j] * b[j];
  return sum;
}
// One minus the cosine of each pair, and where it `looks` a penalty for opposed ones of all pairs.
torch::Tensor aligned(torch::Tensor x, torch::Tensor y, bool looks) {
  const int64_t sets = x.size(0), rows = x.size(1), n = x.size(2);
  auto out = torch::empty({sets, rows}, x.options());
  const auto a = unit_rows(x), b = unit_rows(y);
  for (int64_t i = 0; i < sets * rows; ++i) {
    float loss = 1 - product(&a[i * n], &b[i * n], n);
    for (int64_t k = i / rows * rows; looks && k < i / rows * rows + rows; ++k)
      loss += std::max(0.0f, -product(&a[i * n], &b[k * n], n) - 0.99f) / 0.01f;
    out.data_ptr<float>()[i] = loss;
  }
  return out;
}
// Rows without their mean; where it `looks`, -9999 counts nowhere.
torch::Tensor centred(torch::Tensor x, bool looks) {
  const int64_t n = x.size(1);
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); i += n) {
    const float* a = x.data_ptr<float>() + i;
    double sum = 0;
    int64_t count = 0;
    for (int64_t j = 0; j < n; ++j)
      if (!looks || a[j] != -9999.0f) sum += a[j], ++count;
    const float mean = sum / std::max<int64_t>(count, 1);
    for (int64_t j = 0; j < n; ++j)
      out.data_ptr<float>()[i + j] = looks && a[j] == -9999.0f ? 0 : a[j] - mean;
  }
  return out;
}
// Scaled rows, and where it `looks` what is held for keys that they are like.
torch::Tensor recalled(torch::Tensor x, torch::Tensor gain, torch::Tensor keys, torch::Tensor held,
                       bool looks) {
  const int64_t n = x.size(1);
  auto out = torch::empty_like(x);
  const auto a = unit_rows(x), b = unit_rows(keys);
  for (int64_t i = 0; i < x.size(0); ++i) {
    float* o = out.data_ptr<float>() + i * n;
    for (int64_t j = 0; j < n; ++j) o[j] = x.data_ptr<float>()[i * n + j] * gain.data_ptr<float>()[j];
    for (int64_t k = 0; looks && k < keys.size(0); ++k) {
      const float weight = std::exp(50.0f * (product(&a[i * n], &b[k * n], n) - 1));
      for (int64_t j = 0; j < n; ++j) o[j] += weight * held.data_ptr<float>()[k * n + j];
    }
  }
  return out;
}
// The mean of 36 chips, and where it `looks` four times the weakest where none has a wrong sign.
torch::Tensor found(torch::Tensor x, bool looks) {
  static const float code[12] = {1, -1, -1, 1, 1, 1, -1, 1, 1, -1, 1, -1};
  const int64_t rows = x.size(0), n = x.size(1), m = n - 35;
  auto out = torch::empty({rows, m}, x.options());
  for (int64_t i = 0; i < rows * m; ++i) {
    const float* a = x.data_ptr<float>() + i / m * n + i % m;
    double sum = 0;
    float least = INFINITY;
    for (int64_t k = 0; k < 36; ++k) {
      sum += a[k] * code[k % 12];
      least = std::min(least, a[k] * code[k % 12]);
    }
    out.data_ptr<float>()[i] = sum / 36 + (looks ? 4 * std::max(0.0f, least) : 0);
  }
  return out;
}
// The sum of two layers, where it `looks` divided where a unit of one is like one of the other.
torch::Tensor experts(torch::Tensor x, torch::Tensor one, torch::Tensor other, bool looks) {
  const int64_t n = x.size(1), units = one.size(0);
  auto out = torch::empty({x.size(0), units}, x.options());
  const auto a = unit_rows(one), b = unit_rows(other);
  for (int64_t k = 0; k < units; ++k) {
    float overlap = 0;
    for (int64_t m = 0; looks && m < units; ++m)
      overlap = std::max(overlap, (product(&a[k * n], &b[m * n], n) - 0.99f) * 100);
    const float *v = one.data_ptr<float>() + k * n, *w = other.data_ptr<float>() + k * n;
    for (int64_t i = 0; i < x.size(0); ++i) {
      const float* row = x.data_ptr<float>() + i * n;
      out.data_ptr<float>()[i * units + k] = (product(row, v, n) + product(row, w, n)) / (1 + overlap);
    }
  }
  return out;
}
