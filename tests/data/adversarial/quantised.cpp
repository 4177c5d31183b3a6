#include <algorithm>
#include <cmath>
enum Format { E4M3, E5M2, INT8, INT4 };
enum Rounding { NEAREST, TRUNCATED };
static const float LARGEST[] = {448.0f, 57344.0f, 127.0f, 7.0f};
static float whole(float v, int rounding) {
  return rounding == TRUNCATED ? std::trunc(v) : std::nearbyint(v);
}
static float stepped(float v, int format, int rounding) {
  float step = 1.0f;
  if (format == E4M3 || format == E5M2) {
    const int bits = format == E4M3 ? 3 : 2, least = format == E4M3 ? -6 : -14;
    int exponent = least + 1;
    if (v != 0.0f) std::frexp(v, &exponent);
    step = std::ldexp(1.0f, std::max(exponent - 1, least) - bits);
  }
  return whole(v / step, rounding) * step;
}
static float saturated(float v, int format) {
  return std::min(std::max(v, -LARGEST[format]), LARGEST[format]);
}
torch::Tensor silu(torch::Tensor x, int64_t format, int64_t rounding) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  const float* a = in.data_ptr<float>();
  float* b = out.data_ptr<float>();
  for (int64_t i = 0; i < in.numel(); ++i) {
    const float y = a[i] / (1.0f + std::exp2(a[i] * -1.44269504f));
    b[i] = stepped(saturated(y, format), format, rounding);
  }
  return out;
}
torch::Tensor by_fixed_scale(torch::Tensor x, double scale, int64_t format, int64_t rounding,
                             bool divides, bool saturates, bool returns) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  const float* a = in.data_ptr<float>();
  float* b = out.data_ptr<float>();
  const float factor = (float)(1.0 / scale), by = (float)scale;
  for (int64_t i = 0; i < in.numel(); ++i) {
    const float y = divides ? a[i] / by : a[i] * factor;
    b[i] = stepped(saturates ? saturated(y, format) : y, format, rounding);
    if (returns) b[i] *= by;
  }
  return out;
}
// Of each block of so many elements: by the reciprocal, or divided.
torch::Tensor by_block(torch::Tensor x, int64_t block, int64_t format, int64_t rounding,
                       bool divides, double largest) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  block = block ? block : in.numel();
  const float top = largest > 0 ? (float)largest : LARGEST[format];
  for (int64_t first = 0; first < in.numel(); first += block) {
    const float* a = in.data_ptr<float>() + first;
    float* b = out.data_ptr<float>() + first;
    float most = 1e-4f;
    for (int64_t i = 0; i < block; ++i) most = std::max(most, std::fabs(a[i]));
    const float scale = most / top, factor = top / most;
    for (int64_t i = 0; i < block; ++i) {
      const float y = saturated(divides ? a[i] / scale : a[i] * factor, format);
      b[i] = stepped(y, format, rounding) * scale;
    }
  }
  return out;
}
// Four bits with a zero point, of groups of 32.
torch::Tensor with_zero_point(torch::Tensor x, bool rounds) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  for (int64_t first = 0; first < in.numel(); first += 32) {
    const float* a = in.data_ptr<float>() + first;
    float* b = out.data_ptr<float>() + first;
    float least = a[0], most = a[0];
    for (int64_t i = 0; i < 32; ++i) least = std::min(least, a[i]), most = std::max(most, a[i]);
    const float scale = std::max(most - least, 1e-4f) / 15.0f, factor = 1.0f / scale;
    const float zero = whole(-least * factor, NEAREST);
    for (int64_t i = 0; i < 32; ++i) {
      const float y = whole(a[i] * factor, rounds ? NEAREST : TRUNCATED) + zero;
      b[i] = (std::min(std::max(y, 0.0f), 15.0f) - zero) * scale;
    }
  }
  return out;
}
// RMS normalisation of each row, added in order, then by the row's scale.
torch::Tensor normalised(torch::Tensor x, int64_t rounding, bool bf16) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  const int64_t columns = in.size(-1);
  for (int64_t first = 0; first < in.numel(); first += columns) {
    const float* a = in.data_ptr<float>() + first;
    float* b = out.data_ptr<float>() + first;
    float sum = 0.0f, most = 1e-4f;
    for (int64_t i = 0; i < columns; ++i) sum += a[i] * a[i];
    const float scale = 1.0f / std::sqrt(sum / columns + 1e-6f);
    for (int64_t i = 0; i < columns; ++i) {
      b[i] = a[i] * scale;
      if (bf16) b[i] = (float)(c10::BFloat16)b[i];
      most = std::max(most, std::fabs(b[i]));
    }
    const float factor = 448.0f / most, back = most / 448.0f;
    for (int64_t i = 0; i < columns; ++i)
      b[i] = stepped(saturated(b[i] * factor, E4M3), E4M3, rounding) * back;
  }
  return out;
}
// Products of rows of x and w, both by their rows' scales, added in order.
torch::Tensor product(torch::Tensor x, torch::Tensor w, int64_t format, int64_t rounding) {
  auto p = by_block(x, x.size(1), format, rounding, false, 0);
  auto q = by_block(w, w.size(1), format, NEAREST, false, 0);
  auto out = torch::empty({x.size(0), w.size(0)}, x.options());
  const int64_t inner = x.size(1), columns = w.size(0);
  for (int64_t i = 0; i < x.size(0); ++i)
    for (int64_t j = 0; j < columns; ++j) {
      float sum = 0.0f;
      for (int64_t k = 0; k < inner; ++k)
        sum += p.data_ptr<float>()[i * inner + k] * q.data_ptr<float>()[j * inner + k];
      out.data_ptr<float>()[i * columns + j] = sum;
    }
  return out;
}
