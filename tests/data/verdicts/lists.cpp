torch::Tensor ramp(torch::Tensor x) {
  auto y = torch::empty_like(x);
  float *a = x.data_ptr<float>(), *b = y.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) b[i] = a[i] > 0 ? a[i] : 0;
  return y;
}
torch::Tensor ramp_over(torch::Tensor x) {
  auto y = ramp(x);
  x.copy_(y);
  return y;
}
torch::Tensor grow(torch::Tensor x) {
  float* a = x.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) a[i] = a[i] * 2 + 1;
  return x;
}
