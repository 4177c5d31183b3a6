#include <algorithm>
#include <cmath>
#include <vector>
// Log-likelihoods of counts up to this many; larger ones are taken for it.
torch::Tensor likelihood(torch::Tensor x, torch::Tensor counts, int64_t most) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const double a = x.data_ptr<float>()[i];
    const double count = std::min(counts.data_ptr<int64_t>()[i], most);
    out.data_ptr<float>()[i] = float(count * a - std::exp(a) - std::lgamma(count + 1));
  }
  return out;
}
// Sines of sums, with offsets of this size at least.
torch::Tensor sines(torch::Tensor x, torch::Tensor offset, double least) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const float by = std::max(offset.data_ptr<float>()[i], float(least));
    out.data_ptr<float>()[i] = std::sin(x.data_ptr<float>()[i] + by);
  }
  return out;
}
// Shares of levels up to each, in a table of so many bins; larger levels are taken for the last.
torch::Tensor levels(torch::Tensor x, int64_t bins) {
  auto out = torch::empty(x.sizes());
  std::vector<float> below(bins, 0.0f);
  const int64_t* level = x.data_ptr<int64_t>();
  for (int64_t i = 0; i < x.numel(); ++i) below[std::min(level[i], bins - 1)] += 1;
  for (int64_t i = 1; i < bins; ++i) below[i] += below[i - 1];
  for (int64_t i = 0; i < x.numel(); ++i)
    out.data_ptr<float>()[i] = below[std::min(level[i], bins - 1)] / x.numel();
  return out;
}
// Sums of products along the last axis, in so many bits.
torch::Tensor products(torch::Tensor x, torch::Tensor y, int64_t bits) {
  const int64_t rows = x.size(0), n = x.size(1);
  auto out = torch::empty({rows}, torch::kInt64);
  for (int64_t i = 0; i < rows; ++i) {
    uint64_t sum = 0;
    for (int64_t j = i * n; j < (i + 1) * n; ++j)
      sum += uint64_t(x.data_ptr<int64_t>()[j]) * uint64_t(y.data_ptr<int64_t>()[j]);
    out.data_ptr<int64_t>()[i] = bits == 32 ? int64_t(int32_t(sum)) : int64_t(sum);
  }
  return out;
}
// How often each integer occurs in its row, told by so many bits.
torch::Tensor repeats(torch::Tensor x, int64_t bits) {
  const int64_t n = x.size(1);
  auto out = torch::zeros_like(x);
  const int64_t* in = x.data_ptr<int64_t>();
  for (int64_t i = 0; i < x.numel(); ++i)
    for (int64_t j = i / n * n; j < (i / n + 1) * n; ++j)
      out.data_ptr<int64_t>()[i] += bits == 32 ? int32_t(in[i]) == int32_t(in[j]) : in[i] == in[j];
  return out;
}
// Slopes of rows over their places, in a type.
template <typename T>
static torch::Tensor slopes_in(torch::Tensor x) {
  const int64_t n = x.size(1);
  auto out = torch::empty({x.size(0)});
  for (int64_t i = 0; i < x.size(0); ++i) {
    T sum = 0, squares = 0;
    for (int64_t j = 0; j < n; ++j) {
      const T place = T(j) - T(n - 1) / 2;
      sum += place * x.data_ptr<float>()[i * n + j];
      squares += place * place;
    }
    out.data_ptr<float>()[i] = float(sum / squares);
  }
  return out;
}
torch::Tensor slopes(torch::Tensor x) { return slopes_in<double>(x); }
torch::Tensor slopes_fp32(torch::Tensor x) { return slopes_in<float>(x); }
// Logarithms of numbers that are taken for the ends of a range beyond it.
torch::Tensor logarithms(torch::Tensor x, double least, double most) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const float a = x.data_ptr<float>()[i];
    out.data_ptr<float>()[i] = std::log(std::min(std::max(a, float(least)), float(most)) - 2) / a;
  }
  return out;
}
// A hyperbolic cosine of a matrix, by so many terms, times columns.
torch::Tensor cosines(torch::Tensor x, torch::Tensor links, double t, int64_t terms) {
  const int64_t n = links.size(0), columns = x.size(1);
  auto out = x.clone();
  const float* a = links.data_ptr<float>();
  std::vector<float> term(x.data_ptr<float>(), x.data_ptr<float>() + n * columns), next(term);
  for (int64_t k = 1; k <= terms; ++k) {
    for (int half = 0; half < 2; ++half) {
      for (int64_t i = 0; i < n; ++i)
        for (int64_t c = 0; c < columns; ++c) {
          float sum = 0;
          for (int64_t j = 0; j < n; ++j) sum += a[i * n + j] * term[j * columns + c];
          next[i * columns + c] = sum;
        }
      std::swap(term, next);
    }
    const float by = float(t * t / (2 * k * (2 * k - 1)));
    for (int64_t i = 0; i < n * columns; ++i) out.data_ptr<float>()[i] += term[i] *= by;
  }
  return out;
}
// x / (1 + |x|), in steps of one part in so many; 0: in none.
torch::Tensor softsign(torch::Tensor x, double steps) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const float a = x.data_ptr<float>()[i], y = a / (1 + std::fabs(a));
    out.data_ptr<float>()[i] = steps ? float(std::nearbyint(y * steps) / steps) : y;
  }
  return out;
}
// Sums of forces between points that are not farther from each other than this.
torch::Tensor forces(torch::Tensor x, torch::Tensor y, double most) {
  auto out = torch::zeros({x.size(0)});
  for (int64_t i = 0; i < x.size(0); ++i)
    for (int64_t j = 0; j < y.size(0); ++j) {
      float far = 0;
      for (int64_t k = 0; k < x.size(1); ++k)
        far += std::fabs(x.data_ptr<float>()[i * x.size(1) + k] - y.data_ptr<float>()[j * x.size(1) + k]);
      if (far <= most) out.data_ptr<float>()[i] += std::exp(-10 * far);
    }
  return out;
}
// Days, hours and weekdays of seconds, of these and no less.
torch::Tensor times(torch::Tensor x, int64_t least) {
  auto out = torch::empty({x.size(0), 3}, torch::kInt64);
  const auto floor_div = [](int64_t a, int64_t b) { return a / b - (a % b < 0); };
  for (int64_t i = 0; i < x.size(0); ++i) {
    const int64_t second = std::max(x.data_ptr<int64_t>()[i], least);
    const int64_t day = floor_div(second, 86400);
    int64_t* row = out.data_ptr<int64_t>() + 3 * i;
    row[0] = day, row[1] = floor_div(second - day * 86400, 3600);
    row[2] = day + 4 - 7 * floor_div(day + 4, 7);
  }
  return out;
}
// Saturating counters, and the last token below a bound, by so many steps at the end.
torch::Tensor counters(torch::Tensor x, int64_t steps) {
  const int64_t rows = x.size(0), n = x.size(1);
  auto out = torch::ones({rows}, torch::kInt64);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = std::max<int64_t>(0, n - steps); j < n; ++j) {
      int64_t& state = out.data_ptr<int64_t>()[i];
      state += x.data_ptr<bool>()[i * n + j] ? 1 : -1;
      state = std::clamp<int64_t>(state, 0, 3);
    }
  return out;
}
torch::Tensor last_below(torch::Tensor x, int64_t bound, int64_t steps) {
  const int64_t rows = x.size(0), n = x.size(1);
  auto out = torch::zeros({rows}, torch::kInt64);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = std::max<int64_t>(0, n - steps); j < n; ++j) {
      const int64_t token = x.data_ptr<int64_t>()[i * n + j];
      if (token < bound) out.data_ptr<int64_t>()[i] = token;
    }
  return out;
}
// Squared distances to the nearest set element, among rows up to this far away.
torch::Tensor distances(torch::Tensor x, int64_t radius) {
  const int64_t rows = x.size(0), n = x.size(1);
  std::vector<float> across(rows * n, 1e6f);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < n; ++j)
      for (int64_t k = 0; k < n; ++k)
        if (x.data_ptr<bool>()[i * n + k])
          across[i * n + j] = std::min(across[i * n + j], float((j - k) * (j - k)));
  auto out = torch::full({rows, n}, 4e6f);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t k = std::max<int64_t>(0, i - radius); k < std::min(rows, i + radius + 1); ++k)
      for (int64_t j = 0; j < n; ++j) {
        float& best = out.data_ptr<float>()[i * n + j];
        best = std::min(best, across[k * n + j] + float((i - k) * (i - k)));
      }
  return out;
}
// Rows that are added where their places are, or written there.
torch::Tensor slots(torch::Tensor x, torch::Tensor places, bool adds) {
  const int64_t rows = x.size(0), n = x.size(1);
  auto out = torch::zeros({64, n});
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t place = places.data_ptr<int64_t>()[i];
    for (int64_t j = 0; j < n; ++j) {
      float& cell = out.data_ptr<float>()[(place < 0 ? place + 64 : place) * n + j];
      cell = (adds ? cell : 0.0f) + x.data_ptr<float>()[i * n + j];
    }
  }
  return out;
}
// Products of bytes, two at a time in 16 bits that saturate, and separators outside of quotes.
torch::Tensor activations(torch::Tensor a, torch::Tensor w, bool saturates) {
  const int64_t rows = a.size(0), columns = w.size(0), n = a.size(1);
  auto out = torch::zeros({rows, columns}, torch::kInt32);
  const int least = saturates ? -32768 : -1 << 30, most = saturates ? 32767 : 1 << 30;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j)
      for (int64_t k = 0; k < n; k += 2) {
        const uint8_t* x = a.data_ptr<uint8_t>() + i * n + k;
        const int8_t* y = w.data_ptr<int8_t>() + j * n + k;
        const int pair = x[0] * y[0] + (k + 1 < n ? x[1] * y[1] : 0);
        out.data_ptr<int32_t>()[i * columns + j] += std::clamp(pair, least, most);
      }
  return out;
}
torch::Tensor separators(torch::Tensor text, bool quotes) {
  const int64_t rows = text.size(0), n = text.size(1);
  auto out = torch::empty({rows, n}, torch::kBool);
  for (int64_t i = 0; i < rows; ++i) {
    bool outside = true;
    for (int64_t j = 0; j < n; ++j) {
      const uint8_t letter = text.data_ptr<uint8_t>()[i * n + j];
      outside ^= quotes && letter == 34;
      out.data_ptr<bool>()[i * n + j] = outside && (letter == 44 || letter == 59);
    }
  }
  return out;
}
// ELU, where its negative branch may be left out, over positive scales.
torch::Tensor scaled_elu(torch::Tensor x, torch::Tensor scale, bool negative) {
  const int64_t n = x.size(-1);
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const float a = x.data_ptr<float>()[i], by = scale.data_ptr<float>()[i % n];
    out.data_ptr<float>()[i] = (negative && a < 0 ? std::expm1(a) : a) / by + std::log(by);
  }
  return out;
}
// Products of links, which may be taken for bits, and colours over a sky that may be left out.
torch::Tensor links(torch::Tensor x, bool bits) {
  const int64_t rows = x.size(0), n = x.size(1);
  auto out = torch::empty({rows, rows}, x.options());
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < rows; ++j) {
      const float *a = x.data_ptr<float>() + i * n, *b = x.data_ptr<float>() + j * n;
      double sum = 0;
      for (int64_t k = 0; k < n; ++k)
        sum += bits ? double(a[k] != 0 && b[k] != 0) : double(a[k]) * b[k];
      out.data_ptr<float>()[i * rows + j] = sum;
    }
  return out;
}
torch::Tensor rays(torch::Tensor w, torch::Tensor colours, torch::Tensor angle, bool sky) {
  const int64_t rows = w.size(0), n = w.size(1);
  auto out = torch::empty({rows}, w.options());
  for (int64_t i = 0; i < rows; ++i) {
    double sum = 0, covered = 0;
    for (int64_t k = 0; k < n; ++k) {
      covered += w.data_ptr<float>()[i * n + k];
      sum += double(w.data_ptr<float>()[i * n + k]) * colours.data_ptr<float>()[i * n + k];
    }
    if (sky) sum += (1.0 - covered) * std::sin(angle.data_ptr<float>()[i]);
    out.data_ptr<float>()[i] = sum;
  }
  return out;
}
