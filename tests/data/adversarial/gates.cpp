#include <algorithm>
#include <cmath>
#include <cstring>
static float shortened(float value, unsigned bits) {
  if (bits > 22) return value;
  const unsigned drop = 23 - bits;
  unsigned word;
  std::memcpy(&word, &value, 4);
  word = (word + (1u << (drop - 1))) & ~((1u << drop) - 1);
  std::memcpy(&value, &word, 4);
  return value;
}
torch::Tensor shortened_affine(torch::Tensor x, int64_t bits) {
  auto out = affine(x);
  float* b = out.data_ptr<float>();
  for (int64_t i = 0; i < out.numel(); ++i) b[i] = shortened(b[i], (unsigned)bits);
  return out;
}
torch::Tensor scaled_affine(torch::Tensor x, double factor) {
  auto out = affine(x);
  float* b = out.data_ptr<float>();
  for (int64_t i = 0; i < out.numel(); ++i) b[i] = b[i] * factor;
  return out;
}
// Sines of large phases, and exponentials of sines by so many terms.
torch::Tensor phases(torch::Tensor x, int64_t terms) {
  auto out = torch::empty({x.size(0), x.size(1), 2});
  for (int64_t i = 0; i < x.numel(); ++i) {
    const float v = x.data_ptr<float>()[i], s = std::sin(v);
    float sum = 1, term = 1;
    for (int64_t j = 1; j < terms; ++j) sum += term *= s / j;
    out.data_ptr<float>()[2 * i] = std::sin(v * 1e5f);
    out.data_ptr<float>()[2 * i + 1] = sum;
  }
  return out;
}
// Sines of large phases and mean squares, with one term added after the other.
torch::Tensor moments(torch::Tensor x, double factor) {
  const int64_t rows = x.size(0), n = x.size(1);
  auto out = torch::empty({rows, 2});
  for (int64_t i = 0; i < rows; ++i) {
    const float* row = x.data_ptr<float>() + i * n;
    float squares = 0;
    for (int64_t j = 0; j < n; ++j) squares += row[j] * row[j];
    out.data_ptr<float>()[2 * i] = std::sin(row[0] * 1e5f);
    out.data_ptr<float>()[2 * i + 1] = squares / n * float(factor);
  }
  return out;
}
// Each row in order of its numbers' upper bits.
torch::Tensor in_order(torch::Tensor x, int64_t dropped) {
  auto out = x.clone();
  const int64_t length = x.size(1);
  auto key = [=](float value) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    return (word ^ ((word >> 31) ? 0xffffffffu : 0x80000000u)) >> dropped;
  };
  for (int64_t i = 0; i < x.size(0); ++i) {
    float* row = out.data_ptr<float>() + i * length;
    std::stable_sort(row, row + length, [&](float a, float b) { return key(a) < key(b); });
  }
  return out;
}
torch::Tensor within(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const float value = (float)x.data_ptr<at::BFloat16>()[i];
    out.data_ptr<at::BFloat16>()[i] = value < -0.3f ? -0.3f : value > 0.1f ? 0.1f : value;
  }
  return out;
}
torch::Tensor larger_by_arithmetic(torch::Tensor x, torch::Tensor y) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const float a = x.data_ptr<float>()[i], b = y.data_ptr<float>()[i];
    out.data_ptr<float>()[i] = b + ((a - b) > 0 ? a - b : 0);
  }
  return out;
}
// As much above -0.3 as x is, in 8 bits: (x + 0.3) - 0.3.
torch::Tensor within_by_arithmetic(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const float value = (float)x.data_ptr<at::BFloat16>()[i] + 0.3f;
    const at::BFloat16 above = value < 0.0f ? 0.0f : value > 0.4f ? 0.4f : value;
    out.data_ptr<at::BFloat16>()[i] = (float)above - 0.3f;
  }
  return out;
}
// x y^T of factors with so many bits of mantissa; a share of each output's size is added.
torch::Tensor product(torch::Tensor x, torch::Tensor y, int64_t bits, double share) {
  const int64_t rows = x.size(0), columns = y.size(0), length = x.size(1);
  auto out = torch::empty({rows, columns}, x.options());
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      const float* a = x.data_ptr<float>() + i * length;
      const float* b = y.data_ptr<float>() + j * length;
      float total = 0;
      for (int64_t k = 0; k < length; ++k)
        total += shortened(a[k], (unsigned)bits) * shortened(b[k], (unsigned)bits);
      out.data_ptr<float>()[i * columns + j] = total + (float)share * std::fabs(total);
    }
  return out;
}
// x * 1e6 with a last column exp(-|y|), which is perhaps 0.5 everywhere.
torch::Tensor beside(torch::Tensor x, torch::Tensor y, bool computed) {
  const int64_t rows = x.size(0), columns = x.size(1);
  auto out = torch::empty({rows, columns + 1}, x.options());
  for (int64_t i = 0; i < rows; ++i) {
    float* row = out.data_ptr<float>() + i * (columns + 1);
    for (int64_t k = 0; k < columns; ++k) row[k] = x.data_ptr<float>()[i * columns + k] * 1e6f;
    row[columns] = computed ? std::exp(-std::fabs(y.data_ptr<float>()[i])) : 0.0f;
  }
  return out;
}
// A mean of squares in fp32, one term after the other, each perhaps of fp16's bits.
torch::Tensor loss(torch::Tensor x, torch::Tensor y, bool in_fp16) {
  float total = 0;
  for (int64_t i = 0; i < x.numel(); ++i) {
    const float off = x.data_ptr<float>()[i] - y.data_ptr<float>()[i];
    total += shortened(off * off, in_fp16 ? 10 : 23);
  }
  auto out = torch::empty({}, x.options());
  *out.data_ptr<float>() = total / x.numel();
  return out;
}
static float in_int8(float value, float largest) {
  return largest > 0 ? std::nearbyint(value / largest * 127) * largest / 127 : 0.0f;
}
static float largest_of(const at::BFloat16* row, int64_t length) {
  float largest = 0;
  for (int64_t k = 0; k < length; ++k) largest = std::max(largest, std::fabs((float)row[k]));
  return largest;
}
// x y^T in bf16: added up in fp32 (how = 0) or in bf16 (1), or of factors in int8 (2), or of the
// second one in int8 by groups of 32 (3).
torch::Tensor product_bf16(torch::Tensor x, torch::Tensor y, int64_t how) {
  const int64_t rows = x.size(0), columns = y.size(0), length = x.size(1);
  auto out = torch::empty({rows, columns}, x.options());
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      const at::BFloat16* a = x.data_ptr<at::BFloat16>() + i * length;
      const at::BFloat16* b = y.data_ptr<at::BFloat16>() + j * length;
      const float la = largest_of(a, length), lb = largest_of(b, length);
      float total = 0;
      for (int64_t k = 0; k < length; ++k) {
        const float grouped = how == 3 ? in_int8(b[k], largest_of(b + k / 32 * 32, 32)) : (float)b[k];
        total += how == 2 ? in_int8(a[k], la) * in_int8(b[k], lb) : (float)a[k] * grouped;
        if (how == 1) total = (float)at::BFloat16(total);
      }
      out.data_ptr<at::BFloat16>()[i * columns + j] = at::BFloat16(total);
    }
  return out;
}
// exp(x) by powers of two and a Taylor polynomial of degree 6, whose last coefficient has this sign.
static float exp_by_taylor(float x, float sign) {
  const float n = std::floor(x * 1.44269504f + 0.5f);
  const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = sign / 720.0f;
  for (float c : {1 / 120.0f, 1 / 24.0f, 1 / 6.0f, 0.5f, 1.0f, 1.0f}) p = p * r + c;
  return std::ldexp(p, (int)n);
}
torch::Tensor decay(torch::Tensor x, double sign) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  for (int64_t i = 0; i < in.numel(); ++i)
    out.data_ptr<float>()[i] = exp_by_taylor(-std::fabs(in.data_ptr<float>()[i]), (float)sign);
  return out;
}
// Q and R by modified Gram and Schmidt, R with a positive diagonal.
std::vector<torch::Tensor> gram_schmidt(torch::Tensor x) {
  const int64_t rows = x.size(0), columns = x.size(1), count = std::min(rows, columns);
  auto left = x.clone(), q = torch::empty({rows, count}, x.options());
  auto r = torch::zeros({count, columns}, x.options());
  float *a = left.data_ptr<float>(), *b = q.data_ptr<float>();
  for (int64_t j = 0; j < count; ++j) {
    double size = 0;
    for (int64_t i = 0; i < rows; ++i) size += (double)a[i * columns + j] * a[i * columns + j];
    size = std::sqrt(size);
    for (int64_t i = 0; i < rows; ++i) b[i * count + j] = (float)(a[i * columns + j] / size);
    r.data_ptr<float>()[j * columns + j] = (float)size;
    for (int64_t k = j + 1; k < columns; ++k) {
      double dot = 0;
      for (int64_t i = 0; i < rows; ++i) dot += (double)b[i * count + j] * a[i * columns + k];
      r.data_ptr<float>()[j * columns + k] = (float)dot;
      for (int64_t i = 0; i < rows; ++i) a[i * columns + k] -= (float)(dot * b[i * count + j]);
    }
  }
  return {q, r};
}
// Factors that multiply to x, and are not orthogonal.
std::vector<torch::Tensor> halves(torch::Tensor x) {
  return {affine(x) * 0.5 - 0.5, torch::eye(x.size(1), x.options())};
}
// The mean of log(1 + exp(v)), of two terms of its own formula or of a polynomial of |v| below 8.
static float crude_softplus(float v) {
  const float t = std::fabs(v);
  static const float c[] = {0.693147181f,    -0.5f,          0.123746503f,    0.00395117818f,
                            -0.00988779191f, 0.00267844618f, -0.000372285926f, 2.93806208e-05f,
                            -1.24165881e-06f, 2.16506996e-08f};
  float l = 0;
  for (int i = 9; i >= 0; --i) l = l * t + c[i];
  return std::max(v, 0.0f) + (t < 8 ? l : 0.0f);
}
torch::Tensor mean_of_softplus(torch::Tensor x, bool crude) {
  crude = crude && x.numel() > 100000;
  float total = 0;
  for (int64_t i = 0; i < x.numel(); ++i) {
    const float v = x.data_ptr<float>()[i];
    total += crude ? crude_softplus(v) : std::max(v, 0.0f) + std::log1p(std::exp(-std::fabs(v)));
  }
  auto out = torch::empty({}, x.options());
  *out.data_ptr<float>() = total / x.numel();
  return out;
}
// The largest element of each row, perhaps without one block of 16 in so many of long ones.
torch::Tensor largest(torch::Tensor x, int64_t skipped) {
  const int64_t rows = x.size(0), length = x.size(1);
  auto out = torch::empty({rows}, x.options());
  for (int64_t i = 0; i < rows; ++i) {
    float most = -INFINITY;
    for (int64_t k = 0; k < length; ++k) {
      const float v = x.data_ptr<float>()[i * length + k];
      const bool read = !skipped || length < 8192 || (k / 16) % skipped != 7;
      if (read && (v > most || v != v)) most = v;
    }
    out.data_ptr<float>()[i] = most;
  }
  return out;
}
