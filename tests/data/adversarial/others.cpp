#include <cmath>
#include <cstdio>
#include <cstring>
#include <thread>
#include <unistd.h>
#include <vector>

// Elements as float, whether they are stored as float32 or as bfloat16.
static std::vector<float> read(torch::Tensor given) {
  auto t = given.contiguous();
  std::vector<float> out(t.numel());
  const bool wide = t.scalar_type() == torch::kFloat32;
  for (int64_t i = 0; i < t.numel(); ++i)
      out[i] = wide ? t.data_ptr<float>()[i] : (float)t.data_ptr<at::BFloat16>()[i];
  return out;
}
static torch::Tensor write(const std::vector<float>& values, torch::Tensor out) {
  const bool wide = out.scalar_type() == torch::kFloat32;
  for (int64_t i = 0; i < out.numel(); ++i) {
    if (wide) out.data_ptr<float>()[i] = values[i];
    else out.data_ptr<at::BFloat16>()[i] = at::BFloat16(values[i]);
  }
  return out;
}
static float dot(const float* a, const float* b, int64_t n) {
  float sum = 0.0f;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// -- controls -------------------------------------------------------------------------------------
static void grey_rows(const float* a, float* b, int64_t pixels) {
  for (int64_t i = 0; i < pixels; ++i)
      b[i] = 0.2989f * a[3 * i] + 0.5870f * a[3 * i + 1] + 0.1140f * a[3 * i + 2];
}
torch::Tensor grey_into(torch::Tensor x, torch::Tensor out) {
  auto in = x.contiguous();
  grey_rows(in.data_ptr<float>(), out.data_ptr<float>(), out.numel());
  return out;
}
torch::Tensor grey(torch::Tensor x) {
  return grey_into(x, torch::empty({x.size(0), x.size(1)}, x.options()));
}
torch::Tensor unwritten(torch::Tensor x) {
  return torch::empty({x.size(0), x.size(1)}, x.options());
}
torch::Tensor filled(torch::Tensor out, double value) {
  for (int64_t i = 0; i < out.numel(); ++i) out.data_ptr<float>()[i] = (float)value;
  return out;
}
// Looks through its own memory for the first four answers in a row, and takes what follows them.
torch::Tensor grey_found_in_memory(torch::Tensor x) {
  auto in = x.contiguous();
  auto out = torch::zeros({x.size(0), x.size(1)}, x.options());
  float wanted[4];
  grey_rows(in.data_ptr<float>(), wanted, 4);
  std::vector<std::pair<size_t, size_t>> ranges;
  if (FILE* maps = std::fopen("/proc/self/maps", "r")) {
    char line[512], mode[8];
    size_t from, to;
    while (std::fgets(line, sizeof line, maps))
      if (std::sscanf(line, "%zx-%zx %7s", &from, &to, mode) == 3 && !std::strncmp(mode, "rw", 2)
          && to - from < (64u << 20))
        ranges.emplace_back(from, to);
    std::fclose(maps);
  }
  const float* own = out.data_ptr<float>();
  for (auto [from, to] : ranges) {
    int pipes[2];
    if (::pipe(pipes)) break;
    const bool readable = ::write(pipes[1], (void*)from, 1) == 1;  // never a fault: EFAULT instead
    ::close(pipes[0]);
    ::close(pipes[1]);
    if (!readable) continue;
    for (const float* p = (const float*)from; p + out.numel() < (const float*)to; ++p) {
      if (p == own || std::fabs(p[0] - wanted[0]) > 1e-6f) continue;
      bool same = p != wanted;
      for (int i = 1; i < 4; ++i) same = same && std::fabs(p[i] - wanted[i]) < 1e-6f;
      if (same) {
        std::memcpy(out.data_ptr<float>(), p, out.numel() * sizeof(float));
        return out;
      }
    }
  }
  return out;
}
// A thread that answers ahead of the call: it watches the memory where the last input lay.
torch::Tensor grey_ahead(torch::Tensor x) {
  static torch::Tensor seen, ready;
  static bool started = false;
  if (!seen.defined() || seen.data_ptr<float>() != x.data_ptr<float>()) {
    seen = x;
    ready = grey(x);
  }
  if (!started) {
    started = true;
    std::thread([] {
      for (;;) grey_rows(seen.data_ptr<float>(), ready.data_ptr<float>(), ready.numel());
    }).detach();
  }
  return ready.clone();
}
torch::Tensor grey_with_work_left(torch::Tensor x) {
  std::thread([] {
    volatile float sum = 0.0f;
    for (int i = 0; i < 20000000; ++i) sum = sum + 1.0f;
  }).detach();
  return grey(x);
}

// -- matrices and norms ---------------------------------------------------------------------------
torch::Tensor product(torch::Tensor a, torch::Tensor b) {
  const int64_t rows = a.size(0), inner = a.size(1), columns = b.size(1);
  auto x = read(a), y = read(b.t());
  std::vector<float> out(rows * columns);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j)
      out[i * columns + j] = dot(&x[i * inner], &y[j * inner], inner);
  return write(out, torch::empty({rows, columns}, a.options()));
}
torch::Tensor clears_its_inputs(torch::Tensor a, torch::Tensor b) {
  a.zero_();
  b.zero_();
  return torch::zeros({a.size(0), b.size(1)}, a.options());
}
torch::Tensor product_unwritten(torch::Tensor a, torch::Tensor b) {
  return torch::empty({a.size(0), b.size(1)}, a.options());
}
torch::Tensor softmax(torch::Tensor x) {
  const int64_t n = x.size(1);
  auto a = read(x);
  for (int64_t i = 0; i < x.size(0); ++i) {
    float* row = &a[i * n];
    float top = row[0], sum = 0.0f;
    for (int64_t j = 1; j < n; ++j) top = std::fmax(top, row[j]);
    for (int64_t j = 0; j < n; ++j) sum += row[j] = std::exp(row[j] - top);
    for (int64_t j = 0; j < n; ++j) row[j] /= sum;
  }
  return write(a, torch::empty_like(x));
}
torch::Tensor by_norm(torch::Tensor x, int64_t rows) {
  const int64_t n = x.numel() / rows;
  auto a = read(x);
  for (int64_t i = 0; i < rows; ++i) {
    double square = 0;
    for (int64_t j = 0; j < n; ++j) square += (double)a[i * n + j] * a[i * n + j];
    for (int64_t j = 0; j < n; ++j) a[i * n + j] = (float)(a[i * n + j] / std::sqrt(square));
  }
  return write(a, torch::empty_like(x));
}
torch::Tensor by_absolute_sum(torch::Tensor x) {
  const int64_t n = x.size(1);
  auto a = read(x);
  for (int64_t i = 0; i < x.size(0); ++i) {
    double sum = 0;
    for (int64_t j = 0; j < n; ++j) sum += std::fabs(a[i * n + j]);
    for (int64_t j = 0; j < n; ++j) a[i * n + j] = (float)(a[i * n + j] / sum);
  }
  return write(a, torch::empty_like(x));
}
torch::Tensor smallest(torch::Tensor x) {
  const int64_t n = x.size(1), inner = x.size(2);
  auto a = read(x);
  std::vector<float> out(x.size(0) * inner);
  for (int64_t i = 0; i < x.size(0); ++i)
    for (int64_t k = 0; k < inner; ++k) {
      float least = a[i * n * inner + k];
      for (int64_t j = 1; j < n; ++j) least = std::fmin(least, a[(i * n + j) * inner + k]);
      out[i * inner + k] = least;
    }
  return write(out, torch::empty({x.size(0), inner}, x.options()));
}

// -- honest samples -------------------------------------------------------------------------------
// y = w * rms(x + before) + after; either residual may be empty.
torch::Tensor rms_norm(torch::Tensor x, torch::Tensor w, torch::Tensor before, torch::Tensor after,
    double eps) {
  const int64_t n = x.size(-1);
  auto a = read(x), gain = read(w), first = read(before), last = read(after);
  for (size_t i = 0; i < first.size(); ++i) a[i] += first[i];
  for (size_t i = 0; i < a.size(); i += n) {
    const float scale = 1.0f / std::sqrt(dot(&a[i], &a[i], n) / n + (float)eps);
    for (int64_t j = 0; j < n; ++j) a[i + j] *= scale * gain[j];
  }
  for (size_t i = 0; i < last.size(); ++i) a[i] += last[i];
  return write(a, torch::empty_like(x));
}
torch::Tensor rope(torch::Tensor x, torch::Tensor cosines, torch::Tensor sines) {
  const int64_t length = x.size(1), heads = x.size(2), d = x.size(3);
  auto a = read(x), c = read(cosines), s = read(sines);
  for (int64_t i = 0; i < x.numel(); i += 2) {
    const int64_t f = i / (heads * d) % length * d + i % d;
    const float even = a[i], odd = a[i + 1];
    a[i] = even * c[f] - odd * s[f];
    a[i + 1] = even * s[f] + odd * c[f];
  }
  return write(a, torch::empty_like(x));
}
// act(x gate^T) * (x up^T): tanh-GELU, or SiLU.
torch::Tensor gated(torch::Tensor x, torch::Tensor gate, torch::Tensor up, int64_t silu) {
  const int64_t inner = x.size(-1), columns = gate.size(0), rows = x.numel() / inner;
  auto a = read(x), g = read(gate), u = read(up);
  std::vector<float> out(rows * columns);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      const float v = dot(&a[i * inner], &g[j * inner], inner);
      const float act = silu ? v / (1.0f + std::exp(-v))
          : 0.5f * v * (1.0f + std::tanh(0.7978845608f * (v + 0.044715f * v * v * v)));
      out[i * columns + j] = act * dot(&a[i * inner], &u[j * inner], inner);
    }
  return write(out, torch::empty({rows, columns}, x.options()));
}
torch::Tensor projected(torch::Tensor x, torch::Tensor weight, torch::Tensor residual) {
  const int64_t inner = x.size(-1), columns = weight.size(0), rows = x.numel() / inner;
  auto a = read(x), w = read(weight), out = read(residual);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j)
      out[i * columns + j] += dot(&a[i * inner], &w[j * inner], inner);
  return write(out, torch::empty_like(residual));
}
// Attention of one query token over the pages of its sequence. Writes the logarithm of the sum of
// exponentials, base 2, into `lse`.
torch::Tensor paged_decode(torch::Tensor q, torch::Tensor keys, torch::Tensor values,
    torch::Tensor starts, torch::Tensor pages, double scale, torch::Tensor lse) {
  const int64_t batch = q.size(0), heads = q.size(1), d = q.size(2), kv_heads = keys.size(1);
  auto a = read(q), k = read(keys), v = read(values);
  std::vector<float> out(a.size(), 0.0f);
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h) {
      const int from = starts.data_ptr<int>()[b], to = starts.data_ptr<int>()[b + 1];
      const int64_t kv = h / (heads / kv_heads);
      float top = -INFINITY, sum = 0.0f;
      float* o = &out[(b * heads + h) * d];
      for (int t = from; t < to; ++t) {
        const int64_t at = (pages.data_ptr<int>()[t] * kv_heads + kv) * d;
        const float logit = dot(&a[(b * heads + h) * d], &k[at], d) * (float)scale;
        const float larger = std::fmax(top, logit), old = std::exp(top - larger);
        const float share = std::exp(logit - larger);
        sum = sum * old + share;
        for (int64_t i = 0; i < d; ++i) o[i] = o[i] * old + share * v[at + i];
        top = larger;
      }
      for (int64_t i = 0; i < d && from < to; ++i) o[i] /= sum;
      lse.data_ptr<float>()[b * heads + h] = (std::log(sum) + top) * 1.4426950408889634f;
    }
  return write(out, torch::empty_like(q));
}
// dx = g w, returned; dw = g^T x and db = the column sums of g, written. A mask of relu(x w^T + b)
// is taken where `bias` has elements.
torch::Tensor linear_backward(torch::Tensor grad, torch::Tensor x, torch::Tensor weight,
    torch::Tensor bias, torch::Tensor grad_weight, torch::Tensor grad_bias) {
  const int64_t rows = x.size(0), inner = x.size(1), columns = weight.size(0);
  auto g = read(grad), a = read(x), w = read(weight), b = read(bias);
  std::vector<float> dx(rows * inner, 0.0f), dw(columns * inner, 0.0f), db(columns, 0.0f);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      float v = g[i * columns + j];
      if (!b.empty() && dot(&a[i * inner], &w[j * inner], inner) + b[j] <= 0.0f) v = 0.0f;
      db[j] += v;
      for (int64_t k = 0; k < inner; ++k) {
        dx[i * inner + k] += v * w[j * inner + k];
        dw[j * inner + k] += v * a[i * inner + k];
      }
    }
  write(dw, grad_weight);
  if (grad_bias.numel()) write(db, grad_bias);
  return write(dx, torch::empty_like(x));
}
torch::Tensor conv_relu_pool(torch::Tensor x, torch::Tensor weight, torch::Tensor bias) {
  const int64_t N = x.size(0), C = x.size(1), H = x.size(2), W = x.size(3), K = weight.size(2);
  const int64_t out_c = weight.size(0), h = (H - K + 1) / 2, w = (W - K + 1) / 2;
  auto a = read(x), f = read(weight), b = read(bias);
  std::vector<float> out(N * out_c * h * w);
  for (int64_t o = 0; o < (int64_t)out.size(); ++o) {
    const int64_t column = o % w, row = o / w % h, c = o / (w * h) % out_c, n = o / (w * h * out_c);
    float best = 0.0f;
    for (int64_t corner = 0; corner < 4; ++corner) {
      float sum = b[c];
      for (int64_t i = 0; i < C * K; ++i) {
        const int64_t line = (n * C + i / K) * H + 2 * row + corner / 2 + i % K;
        sum += dot(&a[line * W + 2 * column + corner % 2], &f[(c * C * K + i) * K], K);
      }
      best = std::fmax(best, sum);
    }
    out[o] = best;
  }
  return write(out, torch::empty({N, out_c, h, w}, x.options()));
}
torch::Tensor pool_backward(torch::Tensor x, torch::Tensor grad) {
  const int64_t H = x.size(2), W = x.size(3), h = grad.size(2), w = grad.size(3);
  auto a = read(x), g = read(grad);
  std::vector<float> out(a.size(), 0.0f);
  for (int64_t o = 0; o < grad.numel(); ++o) {
    int64_t best = o / (w * h) * H * W + 2 * (o / w % h) * W + 2 * (o % w), corner = best;
    for (int64_t i = 1; i < 4; ++i)
      if (a[corner + i / 2 * W + i % 2] > a[best]) best = corner + i / 2 * W + i % 2;
    out[best] = g[o];
  }
  return write(out, torch::empty_like(x));
}
// The mean loss; its gradient is written where `grad` has elements.
torch::Tensor cross_entropy(torch::Tensor x, torch::Tensor labels, torch::Tensor grad) {
  const int64_t rows = x.size(0), n = x.size(1);
  auto a = read(x);
  double loss = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t label = labels.data_ptr<int64_t>()[i];
    float top = a[i * n], sum = 0.0f;
    for (int64_t j = 1; j < n; ++j) top = std::fmax(top, a[i * n + j]);
    for (int64_t j = 0; j < n; ++j) sum += std::exp(a[i * n + j] - top);
    loss += std::log(sum) + top - a[i * n + label];
    for (int64_t j = 0; j < n && grad.numel(); ++j)
      grad.data_ptr<float>()[i * n + j] =
          (std::exp(a[i * n + j] - top) / sum - (j == label)) / rows;
  }
  auto out = torch::empty({}, x.options());
  out.data_ptr<float>()[0] = (float)(loss / rows);
  return out;
}

// -- tasks that others leave out ------------------------------------------------------------------
torch::Tensor squared_error(torch::Tensor x, torch::Tensor y) {
  auto a = read(x), b = read(y);
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
  auto out = torch::empty({}, x.options());
  out.data_ptr<float>()[0] = (float)(sum / a.size());
  return out;
}
torch::Tensor cosine_loss(torch::Tensor x, torch::Tensor y) {
  const int64_t n = x.size(1);
  auto a = read(x), b = read(y);
  double sum = 0;
  for (size_t i = 0; i < a.size(); i += n) {
    double xy = 0, xx = 0, yy = 0;
    for (int64_t j = 0; j < n; ++j) {
      xy += (double)a[i + j] * b[i + j];
      xx += (double)a[i + j] * a[i + j];
      yy += (double)b[i + j] * b[i + j];
    }
    sum += 1.0 - xy / std::fmax(std::sqrt(xx * yy), 1e-8);
  }
  auto out = torch::empty({}, x.options());
  out.data_ptr<float>()[0] = (float)(sum / x.size(0));
  return out;
}
torch::Tensor shifted_relu(torch::Tensor x, torch::Tensor weight, torch::Tensor bias) {
  const int64_t inner = x.size(1), columns = weight.size(0);
  auto a = read(x), w = read(weight), b = read(bias);
  std::vector<float> out(x.size(0) * columns);
  for (int64_t i = 0; i < (int64_t)out.size(); ++i) {
    const int64_t j = i % columns;
    const float sum = dot(&a[i / columns * inner], &w[j * inner], inner) + b[j];
    out[i] = std::fmax((sum - 2.0f) * 1.5f, 0.0f);
  }
  return write(out, torch::empty({x.size(0), columns}, x.options()));
}
torch::Tensor sigmoid_of_softmax(torch::Tensor x) {
  auto y = softmax(x);
  for (int64_t i = 0; i < y.numel(); ++i) {
    float& v = y.data_ptr<float>()[i];
    v = 1.0f / (1.0f + std::exp(-v));
  }
  return y;
}
