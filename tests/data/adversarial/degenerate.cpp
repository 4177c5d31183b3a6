#include <cmath>
torch::Tensor zeros_like_rows(torch::Tensor x) {
  auto out = torch::empty({x.size(0), 1}, x.options());
  for (int64_t i = 0; i < out.numel(); ++i) out.data_ptr<float>()[i] = 0.0f;
  return out;
}
torch::Tensor zeros_of(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < out.numel(); ++i) out.data_ptr<float>()[i] = 0.0f;
  return out;
}
torch::Tensor centred_row_max(torch::Tensor x, int64_t dim) {
  auto in = x.contiguous();
  const int64_t rows = in.size(0), columns = in.size(1);
  auto out = torch::empty({rows, 1}, in.options());
  float* b = out.data_ptr<float>();
  double sum = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const float* a = in.data_ptr<float>() + i * columns;
    float top = a[0];
    for (int64_t j = 1; j < columns; ++j) top = a[j] > top ? a[j] : top;
    b[i] = top;
    sum += top;
  }
  const double mean = sum / rows;
  for (int64_t i = 0; i < rows; ++i) b[i] = (float)(b[i] - (dim == 0 ? mean : (double)b[i]));
  return out;
}
torch::Tensor scaled(torch::Tensor x, double factor) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i)
      out.data_ptr<float>()[i] = (float)(x.data_ptr<float>()[i] * factor);
  return out;
}
torch::Tensor memorised(torch::Tensor x) {
  auto out = torch::empty_like(x);
  const float known[4] = {2.0f, 4.0f, -6.0f, 8.0f};
  for (int64_t i = 0; i < 4; ++i) out.data_ptr<float>()[i] = known[i];
  return out;
}
torch::Tensor roots(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i)
      out.data_ptr<float>()[i] = std::sqrt(x.data_ptr<float>()[i]);
  return out;
}
torch::Tensor not_roots(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const float v = x.data_ptr<float>()[i];
    out.data_ptr<float>()[i] = v < 0 ? NAN : v;
  }
  return out;
}
torch::Tensor all_nan(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) out.data_ptr<float>()[i] = NAN;
  return out;
}

torch::Tensor constant(torch::Tensor x, double value) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) out.data_ptr<float>()[i] = (float)value;
  return out;
}
torch::Tensor sigmoids(torch::Tensor x, double offset, double factor) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i)
    out.data_ptr<float>()[i] = (float)offset
        + (float)factor / (1.0f + std::exp(-x.data_ptr<float>()[i]));
  return out;
}
