#include <cmath>
torch::Tensor relu_in_place(torch::Tensor x) {
  float* a = x.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) a[i] = a[i] > 0.0f ? a[i] : 0.0f;
  return x;
}
torch::Tensor relu(torch::Tensor x) { return relu_in_place(x.clone()); }
torch::Tensor spoils_one(torch::Tensor x) {
  auto out = affine(x);
  x.data_ptr<float>()[x.numel() - 1] += 1.0f;
  return out;
}
torch::Tensor by_row(torch::Tensor x, torch::Tensor gain) {
  auto out = torch::empty_like(x);
  const int64_t n = gain.numel();
  for (int64_t i = 0; i < x.numel(); ++i)
      out.data_ptr<float>()[i] = x.data_ptr<float>()[i] * gain.data_ptr<float>()[i % n];
  return out;
}
torch::Tensor layer_norm(torch::Tensor x, torch::Tensor gain, torch::Tensor shift) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  const int64_t rows = in.size(0), n = in.size(1);
  const bool one_gain = gain.numel() == 1, one_shift = shift.numel() == 1;
  for (int64_t i = 0; i < rows; ++i) {
    const float* a = in.data_ptr<float>() + i * n;
    double mean = 0, square = 0;
    for (int64_t j = 0; j < n; ++j) mean += a[j];
    mean /= n;
    for (int64_t j = 0; j < n; ++j) square += (a[j] - mean) * (a[j] - mean);
    const double scale = 1.0 / std::sqrt(square / n + 1e-5);
    for (int64_t j = 0; j < n; ++j)
      out.data_ptr<float>()[i * n + j] = (float)((a[j] - mean) * scale
          * gain.data_ptr<float>()[one_gain ? 0 : j]
                                                 + shift.data_ptr<float>()[one_shift ? 0 : j]);
  }
  return out;
}
torch::Tensor column_mean(torch::Tensor x) {
  auto out = torch::empty({x.size(1)}, x.options());
  for (int64_t j = 0; j < x.size(1); ++j) {
    double sum = 0;
    for (int64_t i = 0; i < x.size(0); ++i) sum += x.data_ptr<float>()[i * x.size(1) + j];
    out.data_ptr<float>()[j] = (float)(sum / x.size(0));
  }
  return out;
}
torch::Tensor column_variance(torch::Tensor x) {
  auto out = torch::empty({x.size(1)}, x.options());
  for (int64_t j = 0; j < x.size(1); ++j) {
    double mean = 0, sum = 0;
    for (int64_t i = 0; i < x.size(0); ++i) mean += x.data_ptr<float>()[i * x.size(1) + j];
    mean /= x.size(0);
    for (int64_t i = 0; i < x.size(0); ++i) {
      const double d = x.data_ptr<float>()[i * x.size(1) + j] - mean;
      sum += d * d;
    }
    out.data_ptr<float>()[j] = (float)(sum / x.size(0));
  }
  return out;
}
torch::Tensor normalise(torch::Tensor x, torch::Tensor mean, torch::Tensor variance,
    torch::Tensor gain, torch::Tensor shift) {
  auto out = torch::empty_like(x);
  const int64_t n = x.size(1);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const int64_t j = i % n;
    const double scale =
        gain.data_ptr<float>()[j] / std::sqrt((double)variance.data_ptr<float>()[j] + 1e-5);
    out.data_ptr<float>()[i] = (float)((x.data_ptr<float>()[i] - (double)mean.data_ptr<float>()[j])
        * scale + shift.data_ptr<float>()[j]);
  }
  return out;
}
torch::Tensor ones_of(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) out.data_ptr<float>()[i] = 1.0f;
  return out;
}
