#include <cmath>
#include <cstring>

// How many bounds lie below each element, or where an even step from the first would put it.
torch::Tensor bins(torch::Tensor x, torch::Tensor bounds, bool even) {
  auto out = torch::empty(x.sizes(), x.options().dtype(torch::kLong));
  const float* b = bounds.data_ptr<float>();
  const int64_t n = bounds.numel();
  const float step = (b[n - 1] - b[0]) / (n - 1);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const float v = x.data_ptr<float>()[i];
    int64_t place = 0;
    if (even) {
      place = std::min<int64_t>(n, std::max<int64_t>(0, std::ceil((v - b[0]) / step)));
    } else {
      for (int64_t j = 0; j < n; ++j) place += b[j] < v;
    }
    out.data_ptr<int64_t>()[i] = place;
  }
  return out;
}

torch::Tensor brightened(torch::Tensor x, bool whole) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const float v = x.data_ptr<float>()[i];
    out.data_ptr<float>()[i] = std::pow((whole ? std::floor(v) : v) / 255.0f, 2.2f);
  }
  return out;
}

// The columns of a mask of ones, followed by zeros, may be counted in its first row.
torch::Tensor masked(torch::Tensor x, torch::Tensor mask, bool counted) {
  auto out = torch::zeros_like(x);
  const int64_t rows = x.size(0), columns = x.size(1);
  const float *a = x.data_ptr<float>(), *m = mask.data_ptr<float>();
  int64_t width = columns;
  if (counted) for (width = 0; width < columns && m[width] != 0; ++width) {}
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < width; ++j)
      out.data_ptr<float>()[i * columns + j] =
          std::sin(a[i * columns + j]) * (counted ? 1.0f : m[i * columns + j]);
  return out;
}

torch::Tensor rows_added(torch::Tensor index, torch::Tensor x, bool distinct) {
  auto out = torch::zeros_like(x);
  const int64_t columns = x.size(1);
  for (int64_t i = 0; i < x.size(0); ++i) {
    const float* from = x.data_ptr<float>() + i * columns;
    float* to = out.data_ptr<float>() + index.data_ptr<int64_t>()[i] * columns;
    if (distinct) std::memcpy(to, from, sizeof(float) * columns);
    else for (int64_t j = 0; j < columns; ++j) to[j] += from[j];
  }
  return out;
}

// Each largest element below the last one, or the largest that is not taken yet.
std::vector<torch::Tensor> three_largest(torch::Tensor x, bool below) {
  const int64_t rows = x.size(0), columns = x.size(1);
  auto values = torch::empty({rows, 3}, x.options());
  auto places = torch::full({rows, 3}, -1, x.options().dtype(torch::kLong));
  for (int64_t i = 0; i < rows; ++i) {
    const float* a = x.data_ptr<float>() + i * columns;
    float* v = values.data_ptr<float>() + i * 3;
    int64_t* p = places.data_ptr<int64_t>() + i * 3;
    for (int k = 0; k < 3; ++k) {
      int64_t best = -1;
      for (int64_t j = columns - 1; j >= 0; --j) {
        const bool free = below ? k == 0 || a[j] < v[k - 1] : j != p[0] && j != p[1];
        if (free && (best < 0 || a[j] > a[best])) best = j;
      }
      p[k] = std::max<int64_t>(best, 0);
      v[k] = a[p[k]];
    }
  }
  return {values, places};
}

torch::Tensor magnitude(torch::Tensor x, float most) {
  auto parts = torch::view_as_real(x).contiguous();
  auto out = torch::empty(x.sizes(), parts.options());
  const float* a = parts.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i)
    out.data_ptr<float>()[i] = std::min(most, std::hypot(a[2 * i], a[2 * i + 1]));
  return out;
}

torch::Tensor sines(torch::Tensor x, torch::Tensor keep, bool dropped) {
  auto out = torch::empty_like(x);
  const int64_t columns = x.size(-1);
  for (int64_t i = 0; i < x.numel(); ++i)
    out.data_ptr<float>()[i] =
        std::sin(x.data_ptr<float>()[i]) * (dropped ? 1.0f : keep.data_ptr<float>()[i % columns]);
  return out;
}

torch::Tensor settled(torch::Tensor x, torch::Tensor w, int64_t steps) {
  auto out = torch::empty_like(x);
  const int64_t columns = x.size(1);
  const float* weights = w.data_ptr<float>();
  std::vector<float> z(columns), next(columns);
  for (int64_t i = 0; i < x.size(0); ++i) {
    std::fill(z.begin(), z.end(), 0.0f);
    for (int64_t step = 0; step < steps; ++step) {
      for (int64_t j = 0; j < columns; ++j) {
        float sum = x.data_ptr<float>()[i * columns + j];
        for (int64_t k = 0; k < columns; ++k) sum += weights[j * columns + k] * z[k];
        next[j] = std::tanh(sum);
      }
      z.swap(next);
    }
    std::copy(z.begin(), z.end(), out.data_ptr<float>() + i * columns);
  }
  return out;
}

// Rows weighted by how near they are. Where one row in `every` has none near it, no others do.
torch::Tensor near(torch::Tensor x, torch::Tensor v, int64_t every) {
  auto out = v.clone();
  const int64_t rows = x.size(0), length = x.size(1), columns = v.size(1);
  const float *a = x.data_ptr<float>(), *b = v.data_ptr<float>();
  bool alone = true;
  auto sum_up = [&](int64_t step) {
    for (int64_t i = 0; i < rows; i += step) {
      std::vector<double> sums(columns, 0.0);
      for (int64_t j = 0; j < rows; ++j) {
        float apart = 0;
        for (int64_t k = 0; k < length; ++k) {
          const float gap = a[i * length + k] - a[j * length + k];
          apart += gap * gap;
        }
        const float weight = std::exp(-apart);
        alone &= i == j || weight < 1e-6f;
        for (int64_t k = 0; k < columns; ++k) sums[k] += weight * b[j * columns + k];
      }
      for (int64_t k = 0; k < columns; ++k) out.data_ptr<float>()[i * columns + k] = sums[k];
    }
  };
  sum_up(every);
  if (!alone) sum_up(1);
  return out;
}
