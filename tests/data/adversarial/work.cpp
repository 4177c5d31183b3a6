#include <cmath>
torch::Tensor touch(torch::Tensor scratch) { scratch.data_ptr<float>()[0] = 1.0f; return scratch; }
torch::Tensor above_twenty_into(torch::Tensor x, torch::Tensor out) {
  for (int64_t i = 0; i < x.numel(); ++i)
      out.data_ptr<float>()[i] = std::fmax(x.data_ptr<float>()[i] - 20.0f, 0.0f);
  return out;
}
torch::Tensor library_product(torch::Tensor x, torch::Tensor w) { return torch::mm(x, w); }
torch::Tensor own_product(torch::Tensor x, torch::Tensor w) {
  auto in = x.contiguous(), weight = w.contiguous();
  const int64_t rows = in.size(0), inner = in.size(1), columns = weight.size(1);
  auto out = torch::empty({rows, columns}, in.options());
  // data_ptr is libtorch's code: called for each factor, it takes half of the time
  const float *left = in.data_ptr<float>(), *right = weight.data_ptr<float>();
  float* to = out.data_ptr<float>();
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < inner; ++k) sum += (double)left[i * inner + k] * right[k * columns + j];
      to[i * columns + j] = (float)sum;
    }
  return out;
}
torch::Tensor library_softmax(torch::Tensor x) { return torch::softmax(x, 1); }
torch::Tensor own_softmax(torch::Tensor x) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  const int64_t rows = in.size(0), columns = in.size(1);
  for (int64_t i = 0; i < rows; ++i) {
    const float* a = in.data_ptr<float>() + i * columns;
    float* b = out.data_ptr<float>() + i * columns;
    double top = a[0], sum = 0;
    for (int64_t j = 1; j < columns; ++j) top = a[j] > top ? a[j] : top;
    for (int64_t j = 0; j < columns; ++j) sum += std::exp(a[j] - top);
    for (int64_t j = 0; j < columns; ++j) b[j] = (float)(std::exp(a[j] - top) / sum);
  }
  return out;
}
#undef NDEBUG
#include <cassert>
torch::Tensor count_of_positives(torch::Tensor x) {
  auto count = torch::zeros({1}, x.options().dtype(torch::kLong));
  for (int64_t i = 0; i < x.numel(); ++i)
    count.data_ptr<int64_t>()[0] += x.data_ptr<float>()[i] > 0;
  return count;
}
torch::Tensor product_of_positives(torch::Tensor x, torch::Tensor w, torch::Tensor count) {
  auto out = torch::zeros({x.size(0), w.size(1)}, x.options());
  const int64_t inner = x.size(1), columns = w.size(1);
  int64_t seen = 0;
  for (int64_t i = 0; i < x.size(0); ++i)
    for (int64_t k = 0; k < inner; ++k) {
      const float a = x.data_ptr<float>()[i * inner + k];
      if (!(a > 0)) continue;
      ++seen;
      for (int64_t j = 0; j < columns; ++j)
        out.data_ptr<float>()[i * columns + j] += a * w.data_ptr<float>()[k * columns + j];
    }
  assert(seen == count.data_ptr<int64_t>()[0]);  // ends the process
  return out;
}
