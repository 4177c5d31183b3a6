#include <cmath>
#include <cstring>
#include <limits>
// One row at a time: f(in, out, columns).
template <typename F> static torch::Tensor by_row(torch::Tensor x, F f) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  const int64_t n = in.size(-1), rows = n ? in.numel() / n : 0;
  for (int64_t i = 0; i < rows; ++i)
    f(in.data_ptr<float>() + i * n, out.data_ptr<float>() + i * n, n);
  return out;
}
template <typename F> static torch::Tensor each_value(torch::Tensor x, F f) {
  return by_row(x, [&](const float* a, float* b, int64_t n) {
    for (int64_t j = 0; j < n; ++j) b[j] = f(a[j]);
  });
}

static torch::Tensor softmax_shifted(torch::Tensor x, bool shifted) {
  return by_row(x, [&](const float* a, float* b, int64_t n) {
    float top = 0.0f, sum = 0.0f;
    if (shifted) {
      top = a[0];
      for (int64_t j = 1; j < n; ++j) top = std::max(top, a[j]);
    }
    for (int64_t j = 0; j < n; ++j) sum += b[j] = std::exp(a[j] - top);
    for (int64_t j = 0; j < n; ++j) b[j] /= sum;
  });
}
torch::Tensor softmax(torch::Tensor x) { return softmax_shifted(x, true); }
torch::Tensor softmax_without_maximum(torch::Tensor x) { return softmax_shifted(x, false); }
// Never overflows, and is right for rows whose values are tame.
torch::Tensor softmax_clamped(torch::Tensor x) { return softmax_shifted(x.clamp(-60, 60), false); }
torch::Tensor softmax_online(torch::Tensor x) {
  return by_row(x, [](const float* a, float* b, int64_t n) {
    float top = -std::numeric_limits<float>::infinity(), sum = 0.0f;
    for (int64_t j = 0; j < n; ++j) {
      const float next = std::max(top, a[j]);
      sum = sum * std::exp(top - next) + std::exp(a[j] - next);
      top = next;
    }
    for (int64_t j = 0; j < n; ++j) b[j] = std::exp(a[j] - top) / sum;
  });
}

torch::Tensor softplus(torch::Tensor x, bool stable) {
  return each_value(x, [=](float v) {
    return stable ? std::max(v, 0.0f) + std::log1p(std::exp(-std::fabs(v))) : std::log(1.0f + std::exp(v));
  });
}
torch::Tensor inverse_sinh(torch::Tensor x, bool stable) {
  return each_value(x, [=](float v) {
    return stable ? std::asinh(v) : std::log(v + std::sqrt(v * v + 1.0f));
  });
}
torch::Tensor log_of_sigmoid(torch::Tensor x, bool stable) {
  return each_value(x, [=](float v) {
    return stable ? std::min(v, 0.0f) - std::log1p(std::exp(-std::fabs(v))) : std::log(1.0f / (1.0f + std::exp(-v)));
  });
}

template <typename F> static torch::Tensor normalised(torch::Tensor x, F moments) {
  return by_row(x, [&](const float* a, float* b, int64_t n) {
    float mean = 0.0f, variance = 0.0f;
    moments(a, n, mean, variance);
    const float scale = 1.0f / std::sqrt(variance + 1e-5f);
    for (int64_t j = 0; j < n; ++j) b[j] = (a[j] - mean) * scale;
  });
}
torch::Tensor norm_one_pass(torch::Tensor x) {
  return normalised(x, [](const float* a, int64_t n, float& mean, float& variance) {
    float squares = 0.0f;
    for (int64_t j = 0; j < n; ++j) { mean += a[j]; squares += a[j] * a[j]; }
    mean /= n;
    variance = std::max(squares / n - mean * mean, 0.0f);
  });
}
// As a block of 32 threads adds: the sums themselves are nearly exact.
torch::Tensor norm_one_pass_by_tree(torch::Tensor x) {
  return normalised(x, [](const float* a, int64_t n, float& mean, float& variance) {
    float sums[32] = {}, squares[32] = {};
    for (int64_t j = 0; j < n; ++j) { sums[j % 32] += a[j]; squares[j % 32] += a[j] * a[j]; }
    for (int step = 16; step; step /= 2)
      for (int i = 0; i < step; ++i) { sums[i] += sums[i + step]; squares[i] += squares[i + step]; }
    mean = sums[0] / n;
    variance = std::max(squares[0] / n - mean * mean, 0.0f);
  });
}
torch::Tensor norm_two_passes(torch::Tensor x) {
  return normalised(x, [](const float* a, int64_t n, float& mean, float& variance) {
    for (int64_t j = 0; j < n; ++j) mean += a[j];
    mean /= n;
    for (int64_t j = 0; j < n; ++j) variance += (a[j] - mean) * (a[j] - mean);
    variance /= n;
  });
}
torch::Tensor norm_two_passes_by_tree(torch::Tensor x) {
  return normalised(x, [](const float* a, int64_t n, float& mean, float& variance) {
    float sums[32] = {}, squares[32] = {};
    for (int64_t j = 0; j < n; ++j) sums[j % 32] += a[j];
    for (int i = 0; i < 32; ++i) mean += sums[i] / n;
    for (int64_t j = 0; j < n; ++j) squares[j % 32] += (a[j] - mean) * (a[j] - mean);
    for (int i = 0; i < 32; ++i) variance += squares[i] / n;
  });
}
// Without each so many-th number (0: of all).
torch::Tensor norm_welford_of(torch::Tensor x, int64_t without) {
  return normalised(x, [=](const float* a, int64_t n, float& mean, float& variance) {
    int64_t count = 0;
    for (int64_t j = 0; j < n; ++j) {
      if (without && j % without == 0) continue;
      const float delta = a[j] - mean;
      mean += delta / (float)++count;
      variance += delta * (a[j] - mean);
    }
    variance /= count;
  });
}
torch::Tensor norm_welford(torch::Tensor x) { return norm_welford_of(x, 0); }
torch::Tensor log_sum_exp(torch::Tensor x, bool shifted) {
  auto in = x.contiguous();
  auto out = torch::empty({in.size(0)}, in.options());
  const int64_t n = in.size(1);
  for (int64_t i = 0; i < in.size(0); ++i) {
    const float* a = in.data_ptr<float>() + i * n;
    float top = 0.0f, sum = 0.0f;
    for (int64_t j = 0; shifted && j < n; ++j) top = j ? std::max(top, a[j]) : a[0];
    for (int64_t j = 0; j < n; ++j) sum += std::exp(a[j] - top);
    out.data_ptr<float>()[i] = top + std::log(sum);
  }
  return out;
}

// Looks at 64 elements, spread or the first ones, and takes all others to be like them.
torch::Tensor relu_guessed(torch::Tensor x, bool spread) {
  auto in = x.contiguous();
  const int64_t step = spread ? std::max<int64_t>(in.numel() / 64, 1) : 1;
  bool positive = true;
  for (int64_t i = 0, k = 0; k < 64 && i < in.numel(); i += step, ++k)
    positive = positive && in.data_ptr<float>()[i] >= 0.0f;
  if (positive) return each_value(in, [](float v) { return v; });
  return each_value(in, [](float v) { return v > 0.0f ? v : 0.0f; });
}
// The same for each row by itself.
torch::Tensor relu_guessed_by_row(torch::Tensor x) {
  return by_row(x, [](const float* a, float* b, int64_t n) {
    bool positive = true;
    for (int64_t j = 0; j < std::min<int64_t>(n, 8); ++j) positive = positive && a[j] >= 0.0f;
    for (int64_t j = 0; j < n; ++j) b[j] = positive ? a[j] : std::max(a[j], 0.0f);
  });
}
torch::Tensor relu_keeping_nan(torch::Tensor x) {
  return each_value(x, [](float v) { return v < 0.0f ? 0.0f : v; });
}
torch::Tensor relu_dropping_nan(torch::Tensor x) {
  return each_value(x, [](float v) { return std::fmax(v, 0.0f); });
}
torch::Tensor relu_dying_of_nan(torch::Tensor x) {
  for (int64_t i = 0; i < x.numel(); ++i)
    if (std::isnan(x.data_ptr<float>()[i])) *(volatile int*)nullptr = 1;
  return relu_keeping_nan(x);
}

// Blocks of 8; a tail of `lost` elements is never written.
torch::Tensor affine_in_blocks(torch::Tensor x, int64_t lost) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  const int64_t n = in.numel(), whole = n / 8 * 8, tail = n - whole;
  const int64_t end = tail == lost ? whole : n;
  for (int64_t i = 0; i < end; ++i)
    out.data_ptr<float>()[i] = in.data_ptr<float>()[i] * 2.0f + 1.0f;
  return out;
}
torch::Tensor affine_in_rows_of_blocks(torch::Tensor x, int64_t lost) {
  return by_row(x, [&](const float* a, float* b, int64_t n) {
    const int64_t end = n % 8 == lost ? n - lost : n;
    for (int64_t j = 0; j < end; ++j) b[j] = a[j] * 2.0f + 1.0f;
  });
}

static torch::Tensor per_column(
    torch::Tensor x, torch::Tensor w, torch::Tensor b, torch::Tensor mean, torch::Tensor variance) {
  int64_t last = x.size(-1);
  const float *g = w.data_ptr<float>(), *h = b.data_ptr<float>();
  const float *m = mean.data_ptr<float>(), *v = variance.data_ptr<float>();
  return by_row(x, [=](const float* a, float* c, int64_t) {
    for (int64_t j = 0; j < last; ++j) c[j] = (a[j] - m[j]) / std::sqrt(v[j] + 1e-5f) * g[j] + h[j];
  });
}
torch::Tensor batch_norm(
    torch::Tensor x, torch::Tensor w, torch::Tensor b, torch::Tensor mean, torch::Tensor variance) {
  return per_column(x, w, b, mean, variance);
}
// As if no batch had ever been seen.
torch::Tensor batch_norm_fresh(torch::Tensor x, torch::Tensor w, torch::Tensor b) {
  return per_column(x, w, b, torch::zeros_like(w), torch::ones_like(w));
}
torch::Tensor batch_norm_training(
    torch::Tensor x, torch::Tensor w, torch::Tensor b, torch::Tensor mean, torch::Tensor variance) {
  auto in = x.contiguous();
  const int64_t rows = in.size(0), columns = in.size(1);
  auto m = torch::zeros_like(w), v = torch::zeros_like(w);
  for (int64_t j = 0; j < columns; ++j) {
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < rows; ++i) sum += in.data_ptr<float>()[i * columns + j];
    for (int64_t i = 0; i < rows; ++i) {
      const double d = in.data_ptr<float>()[i * columns + j] - sum / rows;
      squares += d * d;
    }
    m.data_ptr<float>()[j] = (float)(sum / rows);
    v.data_ptr<float>()[j] = (float)(squares / rows);
    float *seen = mean.data_ptr<float>() + j, *spread = variance.data_ptr<float>() + j;
    *seen = 0.9f * *seen + 0.1f * m.data_ptr<float>()[j];
    *spread = 0.9f * *spread + 0.1f * (float)(squares / (rows - 1));
  }
  return per_column(in, w, b, m, v);
}

// The largest square of clamped elements, without the last `less`.
torch::Tensor clamped_maximum(torch::Tensor x, int64_t less) {
  auto in = x.contiguous();
  const int64_t n = in.size(-1), rows = in.numel() / n;
  auto out = torch::empty({rows}, in.options());
  for (int64_t i = 0; i < rows; ++i) {
    float top = 0.0f;
    for (int64_t j = 0; j < n - less; ++j) {
      const float v = std::min(std::max(in.data_ptr<float>()[i * n + j], -2.0f), 2.0f);
      top = std::max(top, v * v);
    }
    out.data_ptr<float>()[i] = top;
  }
  return out;
}

// Sums in order, as plain loops have them: the error of the first counts twice in the last. Only
// one in `step` elements is looked at for the variance.
torch::Tensor softmin_variance(torch::Tensor x, int64_t step) {
  auto share = softmax(-x);
  const int64_t n = share.size(-1), rows = share.numel() / n;
  auto out = torch::empty({rows}, share.options());
  for (int64_t i = 0; i < rows; ++i) {
    const float* p = share.data_ptr<float>() + i * n;
    float sum = 0.0f, squared = 0.0f;
    for (int64_t j = 0; j < n; j += step) sum += p[j];
    const float mean = sum * step / n;
    for (int64_t j = 0; j < n; j += step) squared += (p[j] - mean) * (p[j] - mean);
    out.data_ptr<float>()[i] = squared * step / n;
  }
  return out;
}

// The largest element of each row and `start`.
torch::Tensor maximum(torch::Tensor x, double start) {
  auto in = x.contiguous();
  const int64_t n = in.size(-1), rows = in.numel() / n;
  auto out = torch::empty({rows}, in.options());
  for (int64_t i = 0; i < rows; ++i) {
    float top = (float)start;
    for (int64_t j = 0; j < n; ++j) top = std::max(top, in.data_ptr<float>()[i * n + j]);
    out.data_ptr<float>()[i] = top;
  }
  return out;
}
torch::Tensor log_sum_exp_from(torch::Tensor x, double start) {
  auto in = x.contiguous(), out = maximum(in, start);
  const int64_t n = in.size(-1), rows = in.numel() / n;
  for (int64_t i = 0; i < rows; ++i) {
    float top = out.data_ptr<float>()[i], sum = 0.0f;
    for (int64_t j = 0; j < n; ++j) sum += std::exp(in.data_ptr<float>()[i * n + j] - top);
    out.data_ptr<float>()[i] = top + std::log(sum);
  }
  return out;
}
// The largest gained element of each row; `late`: the gain of the largest, which is another one
// where the gain is negative.
torch::Tensor gained_maximum(torch::Tensor x, torch::Tensor gain, bool late) {
  auto in = x.contiguous();
  const int64_t n = in.size(-1), channels = gain.numel(), rows = in.numel() / n;
  auto out = torch::empty({in.size(0), channels}, in.options());
  for (int64_t i = 0; i < rows; ++i) {
    const float g = gain.data_ptr<float>()[i % channels];
    float top = -INFINITY;
    for (int64_t j = 0; j < n; ++j)
      top = std::max(top, in.data_ptr<float>()[i * n + j] * (late ? 1.0f : g));
    out.data_ptr<float>()[i] = late ? top * g : top;
  }
  return out;
}
// By its series to the 31st power, which is right to 1e-10 up to 0.5.
torch::Tensor arc_cosine(torch::Tensor x, bool by_series) {
  auto y = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const float v = x.data_ptr<float>()[i];
    double sum = 0, term = v;
    for (int k = 0; k < 16; ++k) {
      sum += term / (2 * k + 1);
      term *= (2.0 * k + 1) / (2 * k + 2) * v * v;
    }
    y.data_ptr<float>()[i] = by_series ? 1.5707963267948966 - sum : std::acos(v);
  }
  return y;
}

// Pairs of a rotary embedding's halves, as many as fill blocks.
torch::Tensor rotary(torch::Tensor x, torch::Tensor cos, torch::Tensor sin, int64_t block) {
  auto out = torch::empty_like(x);
  const int64_t n = x.size(-1), rows = x.numel() / n, half = n / 2 / block * block;
  const float *a = x.data_ptr<float>(), *c = cos.data_ptr<float>(), *s = sin.data_ptr<float>();
  float* b = out.data_ptr<float>();
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t i = row * n, t = row % x.size(-2) * n;
    for (int64_t j = 0, k = n / 2; j < half; ++j, ++k) {
      b[i + j] = a[i + j] * c[t + j] - a[i + k] * s[t + j];
      b[i + k] = a[i + k] * c[t + k] + a[i + j] * s[t + k];
    }
  }
  return out;
}
