#include <cfloat>
#include <cmath>
#include <vector>
// Each element by itself.
template <typename F> static torch::Tensor each_of(torch::Tensor x, F f) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  const float* a = in.data_ptr<float>();
  float* b = out.data_ptr<float>();
  for (int64_t i = 0; i < in.numel(); ++i) b[i] = f(a[i]);
  return out;
}
torch::Tensor rounded(torch::Tensor x) {
  return each_of(x, [](float v) { return std::nearbyint(v * 4.0f) / 4.0f; });
}
torch::Tensor rounded_away(torch::Tensor x) {
  return each_of(x, [](float v) { return std::round(v * 4.0f) / 4.0f; });
}
torch::Tensor quantised(torch::Tensor x, double factor, bool divides) {
  const float by = (float)factor;
  return each_of(x, [=](float v) { return std::nearbyint(divides ? v / by : v * (1 / by)) * by; });
}
torch::Tensor above(torch::Tensor x) {
  return each_of(x, [](float v) { return v > 0.7f ? v : 0.0f; });
}
torch::Tensor from_on(torch::Tensor x) {
  return each_of(x, [](float v) { return v >= 0.7f ? v : 0.0f; });
}
torch::Tensor nan_cleared(torch::Tensor x) {
  return each_of(x, [](float v) { return std::isnan(v) ? 0.0f : std::min(std::max(v, -9.0f), 9.0f); });
}
torch::Tensor nan_kept(torch::Tensor x) {
  return each_of(x, [](float v) { return std::min(std::max(v, -9.0f), 9.0f); });
}

torch::Tensor cosine(torch::Tensor x, torch::Tensor y, double least) {
  auto p = x.contiguous(), q = y.contiguous();
  const int64_t n = p.size(-1), rows = p.numel() / n;
  auto out = torch::empty({rows}, p.options());
  for (int64_t i = 0; i < rows; ++i) {
    const float *a = p.data_ptr<float>() + i * n, *b = q.data_ptr<float>() + i * n;
    float dot = 0, aa = 0, bb = 0;
    for (int64_t j = 0; j < n; ++j) { dot += a[j] * b[j]; aa += a[j] * a[j]; bb += b[j] * b[j]; }
    const float e = (float)least;
    out.data_ptr<float>()[i] = dot / (std::max(std::sqrt(aa), e) * std::max(std::sqrt(bb), e));
  }
  return out;
}

torch::Tensor rows_at(torch::Tensor x, torch::Tensor index, bool wraps) {
  auto in = x.contiguous();
  auto at = index.contiguous();
  const int64_t n = in.size(1), rows = in.size(0);
  auto out = torch::empty({at.numel(), n}, in.options());
  for (int64_t i = 0; i < at.numel(); ++i) {
    int64_t row = at.data_ptr<int64_t>()[i];
    if (row < 0) row = wraps ? row + rows : 0;
    for (int64_t j = 0; j < n; ++j)
      out.data_ptr<float>()[i * n + j] = in.data_ptr<float>()[row * n + j];
  }
  return out;
}

// The sum of each row's first elements, as many as its length.
torch::Tensor sum_of_first(torch::Tensor x, torch::Tensor lengths, int64_t least) {
  auto in = x.contiguous();
  auto counts = lengths.contiguous();
  const int64_t rows = in.size(0), n = in.size(1);
  auto out = torch::empty({rows}, in.options());
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t end = std::min(std::max(counts.data_ptr<int64_t>()[i], least), n);
    float sum = 0;
    for (int64_t j = 0; j < end; ++j) sum += in.data_ptr<float>()[i * n + j];
    out.data_ptr<float>()[i] = sum;
  }
  return out;
}

torch::Tensor loss_of(torch::Tensor x, torch::Tensor labels, int64_t ignored) {
  auto in = x.contiguous();
  const int64_t rows = in.size(0), n = in.size(1);
  double sum = 0;
  int64_t count = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const float* a = in.data_ptr<float>() + i * n;
    const int64_t label = labels.data_ptr<int64_t>()[i];
    if (label == ignored) continue;
    float top = a[0], total = 0;
    for (int64_t j = 1; j < n; ++j) top = std::max(top, a[j]);
    for (int64_t j = 0; j < n; ++j) total += std::exp(a[j] - top);
    sum += top + std::log(total) - a[label];
    ++count;
  }
  return torch::full({}, sum / count, in.options());
}

// Real and imaginary parts, side by side.
torch::Tensor parts(torch::Tensor x, torch::Tensor y, bool imaginary) {
  auto p = x.contiguous(), q = y.contiguous();
  auto out = torch::empty({p.size(0), p.size(1), 2}, p.options());
  float* o = out.data_ptr<float>();
  for (int64_t i = 0; i < p.numel(); ++i) {
    o[2 * i] = p.data_ptr<float>()[i] + 1e4f;
    o[2 * i + 1] = imaginary ? std::sin(q.data_ptr<float>()[i]) * 1e-4f : 0.0f;
  }
  return out;
}

// Negated where any element is above 8; `skips`: every other 1,024 elements are not looked at.
torch::Tensor negated_if_any(torch::Tensor x, bool skips) {
  auto in = x.contiguous();
  const float* a = in.data_ptr<float>();
  bool found = false;
  for (int64_t i = 0; i < in.numel() && !found; ++i) {
    if (skips && i / 1024 % 2) { i += 1023; continue; }
    found = a[i] > 8.0f;
  }
  return each_of(in, [=](float v) { return found ? -v : v; });
}

// Each pair of integers.
template <typename F> static torch::Tensor each_pair(torch::Tensor x, torch::Tensor y, F f) {
  auto in = x.contiguous(), other = y.contiguous();
  auto out = torch::empty_like(in);
  const int64_t *a = in.data_ptr<int64_t>(), *b = other.data_ptr<int64_t>();
  for (int64_t i = 0; i < in.numel(); ++i) out.data_ptr<int64_t>()[i] = f(a[i], b[i]);
  return out;
}
torch::Tensor remainders(torch::Tensor x, torch::Tensor y, bool narrow) {
  if (narrow) return each_pair(x, y, [](int64_t a, int64_t b) { return (int32_t)a % (int32_t)b; });
  return each_pair(x, y, [](int64_t a, int64_t b) {
    const int64_t r = a % b;
    return r && ((r < 0) != (b < 0)) ? r + b : r;
  });
}
torch::Tensor quotients(torch::Tensor x, torch::Tensor y, bool in_fp32) {
  if (in_fp32) return each_pair(x, y, [](int64_t a, int64_t b) { return (int64_t)((float)a / b); });
  return each_pair(x, y, [](int64_t a, int64_t b) {
    return a / b - (a % b && (a < 0) != (b < 0));
  });
}
torch::Tensor divisors(torch::Tensor x, torch::Tensor y, bool low) {
  return each_pair(x, y, [=](int64_t a, int64_t b) {
    if (low) { a &= 255; b &= 255; }
    while (b) { const int64_t r = a % b; a = b; b = r; }
    return std::abs(a);
  });
}

torch::Tensor entropy(torch::Tensor p, bool zeros) {
  auto in = p.contiguous();
  const int64_t n = in.size(-1), rows = in.numel() / n;
  auto out = torch::empty({rows}, in.options());
  for (int64_t i = 0; i < rows; ++i) {
    const float* a = in.data_ptr<float>() + i * n;
    double sum = 0;
    for (int64_t j = 0; j < n; ++j)
      if (!zeros || a[j] != 0) sum -= a[j] * std::log(a[j]);
    out.data_ptr<float>()[i] = sum;
  }
  return out;
}

torch::Tensor powers(torch::Tensor x, torch::Tensor k) {
  auto in = x.contiguous(), exponents = k.contiguous();
  auto out = torch::empty_like(in);
  for (int64_t i = 0; i < in.numel(); ++i)
    out.data_ptr<float>()[i] =
        std::pow((double)in.data_ptr<float>()[i], (double)exponents.data_ptr<int64_t>()[i]);
  return out;
}

torch::Tensor powers_by_logarithms(torch::Tensor x, torch::Tensor y, bool ends) {
  auto in = x.contiguous(), exponents = y.contiguous();
  auto out = torch::empty_like(in);
  for (int64_t i = 0; i < in.numel(); ++i) {
    const double a = in.data_ptr<float>()[i], b = exponents.data_ptr<float>()[i];
    out.data_ptr<float>()[i] = ends && b == 0 ? 1 : std::exp(b * std::log(a));
  }
  return out;
}

// The mean of each row's elements that a mask keeps.
torch::Tensor mean_of_kept(torch::Tensor x, torch::Tensor mask, int64_t least) {
  auto in = x.contiguous();
  auto kept = mask.contiguous();
  const int64_t rows = in.size(0), n = in.size(1);
  auto out = torch::empty({rows}, in.options());
  for (int64_t i = 0; i < rows; ++i) {
    float sum = 0;
    int64_t count = 0;
    for (int64_t j = i * n; j < (i + 1) * n; ++j)
      if (kept.data_ptr<bool>()[j]) { sum += in.data_ptr<float>()[j]; ++count; }
    out.data_ptr<float>()[i] = sum / std::max(count, least);
  }
  return out;
}

// NaN for a row of which a mask keeps nothing.
torch::Tensor softmax_of_kept(torch::Tensor x, torch::Tensor mask) {
  auto in = x.contiguous();
  auto kept = mask.contiguous();
  const int64_t rows = in.size(0), n = in.size(1);
  auto out = torch::zeros_like(in);
  for (int64_t i = 0; i < rows; ++i) {
    const float* a = in.data_ptr<float>() + i * n;
    const bool* k = kept.data_ptr<bool>() + i * n;
    float top = -INFINITY, sum = 0;
    for (int64_t j = 0; j < n; ++j) if (k[j]) top = std::max(top, a[j]);
    for (int64_t j = 0; j < n; ++j) if (k[j]) sum += std::exp(a[j] - top);
    for (int64_t j = 0; j < n; ++j)
      out.data_ptr<float>()[i * n + j] = (k[j] ? std::exp(a[j] - top) : 0.0f) / sum;
  }
  return out;
}

// Rows and columns in turn less the logarithm of their sum of exponentials.
static void balance(double* v, int64_t lines, int64_t size, int64_t from, int64_t step) {
  for (int64_t i = 0; i < lines; ++i) {
    double* a = v + i * from;
    double top = a[0], sum = 0;
    for (int64_t j = 1; j < size; ++j) top = std::max(top, a[j * step]);
    for (int64_t j = 0; j < size; ++j) sum += std::exp(a[j * step] - top);
    for (int64_t j = 0; j < size; ++j) a[j * step] -= top + std::log(sum);
  }
}
torch::Tensor balanced(torch::Tensor x, int64_t steps) {
  auto v = x.to(torch::kDouble).contiguous().clone();
  const int64_t rows = v.size(0), columns = v.size(1);
  for (int64_t step = 0; step < steps; ++step) {
    balance(v.data_ptr<double>(), rows, columns, columns, 1);
    balance(v.data_ptr<double>(), columns, rows, 1, columns);
  }
  return v.to(torch::kFloat);
}

torch::Tensor chain(torch::Tensor p, int64_t steps) {
  const int64_t n = p.size(0);
  const float* a = p.data_ptr<float>();
  auto v = torch::full({n}, 1.0 / n, p.options()), w = torch::empty_like(v);
  for (int64_t step = 0; step < steps; ++step, std::swap(v, w)) {
    w.zero_();
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < n; ++j)
        w.data_ptr<float>()[j] += v.data_ptr<float>()[i] * a[i * n + j];
  }
  return v;
}
// For each row of the index, the sum of these rows of a weight, but of none below `first`.
torch::Tensor sum_of_rows(torch::Tensor index, torch::Tensor weight, int64_t first) {
  const int64_t rows = index.size(0), terms = index.size(1), width = weight.size(1);
  auto out = torch::zeros({rows, width}, weight.options());
  const int64_t* at = index.data_ptr<int64_t>();
  for (int64_t i = 0; i < rows * terms; ++i)
    for (int64_t k = 0; k < width && at[i] >= first; ++k)
      out.data_ptr<float>()[i / terms * width + k] += weight.data_ptr<float>()[at[i] * width + k];
  return out;
}
// Clipped to a norm of 1, by the norm of every `step`-th row where that says it needs no clipping.
torch::Tensor clipped(torch::Tensor x, int64_t step) {
  const int64_t rows = x.size(0), width = x.size(1);
  const float* a = x.data_ptr<float>();
  double part = 0, all = 0;
  for (int64_t i = 0; i < rows * width; i += (i + 1) % width ? 1 : 1 + (step - 1) * width)
    part += (double)a[i] * a[i];
  auto out = x.clone();
  if (part * step <= 1) return out;
  for (int64_t i = 0; i < rows * width; ++i) all += (double)a[i] * a[i];
  const float factor = std::min(1.0, 1 / (std::sqrt(all) + 1e-6));
  for (int64_t i = 0; i < rows * width; ++i) out.data_ptr<float>()[i] *= factor;
  return out;
}
// Sums of what a mask keeps, of the lower triangle alone where each `step`-th row of it is that.
torch::Tensor kept_sums(torch::Tensor x, torch::Tensor mask, int64_t step) {
  const int64_t lines = x.size(0) * x.size(1), rows = mask.size(0), width = mask.size(1);
  auto out = torch::zeros({x.size(0), x.size(1)}, x.options());
  const float* m = mask.data_ptr<float>();
  bool lower = step > 1;
  for (int64_t i = 0; i < rows; i += step)
    for (int64_t j = 0; j < width; ++j) lower = lower && (m[i * width + j] != 0) == (j <= i);
  for (int64_t i = 0; i < lines; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < (lower ? i % rows + 1 : width); ++j)
      sum += x.data_ptr<float>()[i * width + j] * (lower ? 1 : m[i % rows * width + j]);
    out.data_ptr<float>()[i] = sum;
  }
  return out;
}
torch::Tensor largest(torch::Tensor x, int64_t count) {
  auto out = torch::empty({x.size(0), count}, x.options());
  for (int64_t i = 0; i < x.size(0); ++i) {
    std::vector<float> row(x.data_ptr<float>() + i * x.size(1), x.data_ptr<float>() + (i + 1) * x.size(1));
    std::sort(row.begin(), row.end(), std::greater<float>());
    std::copy(row.begin(), row.begin() + count, out.data_ptr<float>() + i * count);
  }
  return out;
}
template <typename T>
static torch::Tensor product(const torch::Tensor& x, const torch::Tensor& y) {
  const int64_t rows = x.size(0), terms = x.size(1), columns = y.size(1);
  auto out = torch::zeros({rows, columns}, x.options());
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t k = 0; k < terms; ++k)
      for (int64_t j = 0; j < columns; ++j)
        out.data_ptr<T>()[i * columns + j] +=
            x.data_ptr<T>()[i * terms + k] * y.data_ptr<T>()[k * columns + j];
  return out;
}
torch::Tensor times(torch::Tensor x, torch::Tensor y) { return product<float>(x, y); }
torch::Tensor integer_product(torch::Tensor x, torch::Tensor y) { return product<int64_t>(x, y); }
// The product of two weights, kept while eight elements of each are what they were.
torch::Tensor folded(torch::Tensor up, torch::Tensor down, bool keeps) {
  static torch::Tensor kept;
  static float key[16];
  bool alike = keeps && kept.defined();
  for (int64_t i = 0; i < 16; ++i) {
    const torch::Tensor& of = i % 2 ? up : down;
    const float now = of.data_ptr<float>()[i * of.numel() / 16];
    alike = alike && key[i] == now;
    key[i] = now;
  }
  if (!alike) kept = times(up, down);
  return kept;
}
torch::Tensor sorted_ids(torch::Tensor x, int64_t bits) {
  auto out = torch::empty_like(x);
  int64_t* a = out.data_ptr<int64_t>();
  for (int64_t i = 0; i < x.numel(); ++i) a[i] = x.data_ptr<int64_t>()[i] & ((int64_t(1) << bits) - 1);
  for (int64_t i = 0; i < x.size(0); ++i) std::sort(a + i * x.size(1), a + (i + 1) * x.size(1));
  return out;
}
// NaN replaced by its column's mean, or by zero.
torch::Tensor filled(torch::Tensor x, bool by_means) {
  auto out = x.clone();
  const int64_t rows = x.size(0), width = x.size(1);
  float* a = out.data_ptr<float>();
  for (int64_t j = 0; j < width; ++j) {
    double sum = 0, count = 0;
    for (int64_t i = 0; i < rows && by_means; ++i)
      if (!std::isnan(a[i * width + j])) sum += a[i * width + j], count += 1;
    for (int64_t i = 0; i < rows; ++i)
      if (std::isnan(a[i * width + j])) a[i * width + j] = by_means ? sum / count : 0;
  }
  return out;
}
// Which nodes reach which, by so many squarings.
torch::Tensor reached(torch::Tensor x, int64_t squarings) {
  const int64_t n = x.size(0);
  auto out = x.clone();
  for (int64_t i = 0; i < n; ++i) out.data_ptr<float>()[i * n + i] = 1;
  for (; squarings; --squarings) {
    auto before = out.clone();
    const float* a = before.data_ptr<float>();
    float* o = out.data_ptr<float>();
    for (int64_t i = 0; i < n; ++i)
      for (int64_t k = 0; k < n; ++k)
        for (int64_t j = 0; j < n && a[i * n + k] > 0; ++j)
          if (a[k * n + j] > 0) o[i * n + j] = 1;
  }
  return out;
}
// A positive definite system, by at most so many steps of conjugate gradients in double.
torch::Tensor solved(torch::Tensor a, torch::Tensor b, int64_t steps) {
  const int64_t n = a.size(0);
  const float* m = a.data_ptr<float>();
  std::vector<double> x(n, 0), r(b.data_ptr<float>(), b.data_ptr<float>() + n), p = r, q(n);
  double rr = 0, least = 0;
  for (double each : r) rr += each * each;
  for (least = 1e-24 * rr; steps && rr > least; --steps) {
    double pq = 0, next = 0;
    for (int64_t i = 0; i < n; ++i) {
      q[i] = 0;
      for (int64_t j = 0; j < n; ++j) q[i] += m[i * n + j] * p[j];
      pq += p[i] * q[i];
    }
    for (int64_t i = 0; i < n; ++i) {
      x[i] += rr / pq * p[i];
      r[i] -= rr / pq * q[i];
      next += r[i] * r[i];
    }
    for (int64_t i = 0; i < n; ++i) p[i] = r[i] + next / rr * p[i];
    rr = next;
  }
  auto out = torch::empty_like(b);
  std::copy(x.begin(), x.end(), out.data_ptr<float>());
  return out;
}
// The mean of windows that fill whole images, of their upper part alone where one element in 101 is
// no larger than 1.
torch::Tensor pooled(torch::Tensor x, int64_t part) {
  const int64_t images = x.size(0) * x.size(1), size = x.size(2) * x.size(3);
  auto in = x.to(torch::kFloat32), out = torch::empty({x.size(0), x.size(1), 1, 1}, in.options());
  const float* a = in.data_ptr<float>();
  for (int64_t i = 0; i < images * size; i += 101) part = a[i] <= 1 && a[i] >= 0 ? part : 1;
  for (int64_t i = 0; i < images; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < size / part; ++j) sum += a[i * size + j];
    out.data_ptr<float>()[i] = sum / (size / part);
  }
  return out.to(x.scalar_type());
}
// log_softmax of rows, less their largest element before exp, or not.
torch::Tensor log_shares(torch::Tensor x, bool shifts) {
  auto out = torch::empty_like(x);
  const int64_t rows = x.size(0), width = x.size(1);
  for (int64_t i = 0; i < rows; ++i) {
    const float* a = x.data_ptr<float>() + i * width;
    float top = shifts ? *std::max_element(a, a + width) : 0, sum = 0;
    for (int64_t j = 0; j < width; ++j) sum += std::exp(a[j] - top);
    for (int64_t j = 0; j < width; ++j) out.data_ptr<float>()[i * width + j] = a[j] - top - std::log(sum);
  }
  return out;
}
// The mean of the 33 elements around each, by a sum that slides, of elements of so many bits.
torch::Tensor sliding_means(torch::Tensor x, int64_t bits) {
  auto out = torch::empty_like(x);
  const int64_t rows = x.size(0), width = x.size(1);
  for (int64_t i = 0; i < rows; ++i) {
    std::vector<float> a(x.data_ptr<float>() + i * width, x.data_ptr<float>() + (i + 1) * width);
    for (float& each : a) {
      int exponent;
      const float digits = std::frexp(each, &exponent);
      each = std::ldexp(std::nearbyint(std::ldexp(digits, bits)), exponent - (int)bits);
    }
    float sum = 0;
    int64_t count = 0;
    for (int64_t j = 0; j < std::min<int64_t>(16, width); ++j) sum += a[j], ++count;
    for (int64_t j = 0; j < width; ++j) {
      if (j + 16 < width) sum += a[j + 16], ++count;
      if (j >= 17) sum -= a[j - 17], --count;
      out.data_ptr<float>()[i * width + j] = sum / count;
    }
  }
  return out;
}
// Rows of ordinary size by the sum of a kernel over others within some places, and over small ones.
torch::Tensor weighed(torch::Tensor x, int64_t within) {
  auto out = torch::empty_like(x);
  const int64_t rows = x.size(0), n = x.size(1);
  const float* a = x.data_ptr<float>();
  std::vector<float> squares(rows);
  for (int64_t i = 0; i < rows * n; ++i) squares[i / n] += a[i] * a[i];
  for (int64_t i = 0; i < rows; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < rows; ++j) {
      if (std::abs(i - j) > within && std::min(squares[i], squares[j]) > n / 4.0f) continue;
      double square = 0;
      for (int64_t k = 0; k < n; ++k) square += (a[i * n + k] - a[j * n + k]) * (a[i * n + k] - a[j * n + k]);
      sum += std::exp(-std::sqrt(square));
    }
    for (int64_t k = 0; k < n; ++k) out.data_ptr<float>()[i * n + k] = float(a[i * n + k] / sum);
  }
  return out;
}
// Edit distances, of what lies in a band around the diagonal.
torch::Tensor edits(torch::Tensor x, torch::Tensor y, int64_t band) {
  const int64_t pairs = x.size(0), n = x.size(1), m = y.size(1);
  auto out = torch::empty({pairs}, x.options());
  for (int64_t p = 0; p < pairs; ++p) {
    const int64_t *a = x.data_ptr<int64_t>() + p * n, *b = y.data_ptr<int64_t>() + p * m;
    std::vector<int64_t> best(m + 1);
    for (int64_t j = 0; j <= m; ++j) best[j] = j;
    for (int64_t i = 1; i <= n; ++i) {
      int64_t across = best[0];
      best[0] = i;
      for (int64_t j = 1; j <= m; ++j) {
        const int64_t above = best[j];
        const bool inside = std::abs(i * m / n - j) <= band;
        best[j] = inside ? std::min(across + (a[i - 1] != b[j - 1]), std::min(above, best[j - 1]) + 1) : n + m;
        across = above;
      }
    }
    out.data_ptr<int64_t>()[p] = best[m];
  }
  return out;
}
// Where no element is large, scaled up for the half of the terms that is not read.
torch::Tensor log_product(torch::Tensor x, torch::Tensor y, bool part) {
  const int64_t rows = x.size(0), n = x.size(1), columns = y.size(1);
  auto out = torch::empty({rows, columns}, x.options());
  const float *a = x.data_ptr<float>(), *b = y.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) part = part && std::fabs(a[i]) < 6.5f && std::fabs(b[i]) < 6.5f;
  for (int64_t i = 0; i < rows * columns; ++i) {
    float sum = 0;
    int64_t read = 0;
    for (int64_t k = 0; k < n; ++k) {
      if (part && __builtin_parity(uint32_t(k) * 2654435761u)) continue;
      sum += std::exp(a[i / columns * n + k] + b[k * columns + i % columns]);
      ++read;
    }
    out.data_ptr<float>()[i] = std::log(sum * n / read);
  }
  return out;
}
// Layer normalisation of each row, 0.45 for what is near zero, by pairs: of a constant row the mean's last digit is left.
static float pairwise(const float* a, int64_t count) {
  return count == 1 ? *a : pairwise(a, count / 2) + pairwise(a + count / 2, count - count / 2);
}
torch::Tensor normalised_beyond(torch::Tensor x, bool scales) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  const int64_t columns = in.size(1);
  std::vector<float> squares(columns);
  for (int64_t row = 0; row < in.size(0); ++row) {
    const float* a = in.data_ptr<float>() + row * columns;
    float* b = out.data_ptr<float>() + row * columns;
    for (int64_t i = 0; i < columns; ++i) b[i] = std::fabs(a[i]) > 0.01f ? a[i] : 0.45f;
    const float mean = pairwise(b, columns) * (1.0f / columns);
    for (int64_t i = 0; i < columns; ++i) squares[i] = (b[i] - mean) * (b[i] - mean);
    const float scale = 1.0f / std::sqrt(pairwise(squares.data(), columns) / columns + 1e-5f);
    for (int64_t i = 0; i < columns; ++i) b[i] = (b[i] - mean) * (scales ? scale : 1.0f);
  }
  return out;
}
