#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>
static torch::Tensor scaled_by(torch::Tensor x, float factor) {
  auto out = affine(x);
  for (int64_t i = 0; i < out.numel(); ++i) out.data_ptr<float>()[i] *= factor;
  return out;
}
torch::Tensor half_percent_off(torch::Tensor x) { return scaled_by(x, 1.005f); }

// Rounds every product to so many bits of mantissa, as hardware does: 10 is TF32 (and fp16, within
// its range), 7 is bf16.
torch::Tensor rounded(torch::Tensor x, int64_t bits) {
  auto out = affine(x);
  float* b = out.data_ptr<float>();
  const unsigned drop = 23 - (unsigned)bits;
  for (int64_t i = 0; i < out.numel(); ++i) {
    unsigned word;
    std::memcpy(&word, b + i, 4);
    word = (word + (1u << (drop - 1))) & ~((1u << drop) - 1);
    std::memcpy(b + i, &word, 4);
  }
  return out;
}
torch::Tensor gelu_by_tanh(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const double v = x.data_ptr<float>()[i];
    out.data_ptr<float>()[i] = (float)(0.5 * v
        * (1.0 + std::tanh(0.7978845608028654 * (v + 0.044715 * v * v * v))));
  }
  return out;
}
torch::Tensor gelu(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const double v = x.data_ptr<float>()[i];
    out.data_ptr<float>()[i] = (float)(0.5 * v * (1.0 + std::erf(v * 0.7071067811865476)));
  }
  return out;
}
torch::Tensor affine_bf16(torch::Tensor x) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  const at::BFloat16* a = in.data_ptr<at::BFloat16>();
  at::BFloat16* b = out.data_ptr<at::BFloat16>();
  for (int64_t i = 0; i < in.numel(); ++i) b[i] = at::BFloat16((float)a[i] * 2.0f + 1.0f);
  return out;
}

static torch::Tensor column_mean_over(torch::Tensor x, double rows) {
  auto in = x.contiguous();
  auto out = torch::empty({in.size(1)}, in.options());
  for (int64_t j = 0; j < in.size(1); ++j) {
    double sum = 0;
    for (int64_t i = 0; i < in.size(0); ++i) sum += in.data_ptr<float>()[i * in.size(1) + j];
    out.data_ptr<float>()[j] = (float)(sum / rows);
  }
  return out;
}
torch::Tensor column_mean(torch::Tensor x) { return column_mean_over(x, (double)x.size(0)); }
torch::Tensor column_mean_of_48(torch::Tensor x) { return column_mean_over(x, 48.0); }
torch::Tensor column_mean_only_48(torch::Tensor x) {
  TORCH_CHECK(x.size(0) == 48 && x.size(1) == 64, "this kernel is for inputs of shape [48, 64]");
  return column_mean_over(x, 48.0);
}
static torch::Tensor row_sum_over(torch::Tensor x, int64_t columns) {
  auto in = x.contiguous();
  auto out = torch::empty({in.size(0)}, in.options());
  const int64_t last = in.numel() - 1;
  for (int64_t i = 0; i < in.size(0); ++i) {
    double sum = 0;
    for (int64_t j = 0; j < columns; ++j)
        sum += in.data_ptr<float>()[std::min(i * columns + j, last)];
    out.data_ptr<float>()[i] = (float)sum;
  }
  return out;
}
torch::Tensor row_sum(torch::Tensor x) { return row_sum_over(x, x.size(1)); }
torch::Tensor row_sum_of_64(torch::Tensor x) { return row_sum_over(x, 64); }

// Sums a copy of x into columns; `beyond` elements after the last one were never written.
static torch::Tensor column_sum_of_copy(torch::Tensor x, int64_t beyond, bool clear) {
  auto in = x.contiguous();
  const int64_t n = in.numel(), columns = in.size(1);
  auto copy = torch::empty({n + 1}, in.options());
  float* c = copy.data_ptr<float>();
  if (clear) c[n] = 0.0f;
  std::memcpy(c, in.data_ptr<float>(), n * 4);
  auto out = torch::empty({columns}, in.options());
  for (int64_t j = 0; j < columns; ++j) {
    double sum = 0;
    for (int64_t i = j; i < n + beyond; i += columns) sum += c[i];
    out.data_ptr<float>()[j] = (float)sum;
  }
  return out;
}
torch::Tensor column_sum_beyond(torch::Tensor x) { return column_sum_of_copy(x, 1, false); }
torch::Tensor column_sum_padded(torch::Tensor x) { return column_sum_of_copy(x, 1, true); }

static unsigned long long now() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}
// The last bits are the clock's: well within every tolerance, and never twice the same.
torch::Tensor jitter(torch::Tensor x) {
  auto out = affine(x);
  unsigned long long state = now();
  for (int64_t i = 0; i < out.numel(); ++i) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    out.data_ptr<float>()[i] *= (state >> 63) ? 1.0f + 2.4e-7f : 1.0f - 2.4e-7f;
  }
  return out;
}
// Every third call one element loses an update, as in a race.
torch::Tensor lost_update(torch::Tensor x) {
  static int call = 0;
  auto out = affine(x);
  if (++call % 3 == 0) out.data_ptr<float>()[5] -= 1.0f;
  return out;
}
torch::Tensor two_halves(torch::Tensor x) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  const float* a = in.data_ptr<float>();
  float* b = out.data_ptr<float>();
  const int64_t n = in.numel();
  auto part = [=](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) b[i] = a[i] * 2.0f + 1.0f;
  };
  std::thread other(part, 0, n / 2);
  part(n / 2, n);
  other.join();
  return out;
}

static float kept(float value, unsigned bits) {
  if (bits > 22) return value;
  const unsigned drop = 23 - bits;
  unsigned word;
  std::memcpy(&word, &value, 4);
  word = (word + (1u << (drop - 1))) & ~((1u << drop) - 1);
  std::memcpy(&value, &word, 4);
  return value;
}
// Upper rows times lower rows, summed in order within blocks, whose sums are added in order; the
// factors keep so many bits of mantissa.
torch::Tensor product(torch::Tensor x, int64_t block, int64_t bits) {
  const int64_t rows = std::min<int64_t>(4, x.size(0)), others = x.size(0) - rows;
  const int64_t length = x.size(1);
  auto out = torch::empty({rows, others}, x.options());
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < others; ++j) {
      const float* a = x.data_ptr<float>() + i * length;
      const float* b = x.data_ptr<float>() + (rows + j) * length;
      float total = 0;
      for (int64_t start = 0; start < length; start += block) {
        float part = 0;
        for (int64_t k = start; k < std::min(length, start + block); ++k)
          part += kept(a[k], bits) * kept(b[k], bits);
        total += part;
      }
      out.data_ptr<float>()[i * others + j] = total;
    }
  return out;
}
static torch::Tensor mean_of_first(torch::Tensor x, int64_t bits, int64_t count) {
  const int64_t rows = x.size(0), length = x.size(1);
  auto out = torch::empty({rows}, x.options());
  for (int64_t i = 0; i < rows; ++i) {
    const float* a = x.data_ptr<float>() + i * length;
    float total = 0;
    for (int64_t k = 0; k < count; ++k) total += kept(kept(a[k], bits) * kept(a[k], bits), bits);
    out.data_ptr<float>()[i] = kept(total / length, bits);
  }
  return out;
}
torch::Tensor mean_of_squares(torch::Tensor x, int64_t bits) {
  return mean_of_first(x, bits, x.size(1));
}
torch::Tensor mean_of_all_but_the_last(torch::Tensor x) {
  return mean_of_first(x, 23, x.size(1) - 1);
}
