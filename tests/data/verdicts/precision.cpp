torch::Tensor scaled_affine(torch::Tensor y, double s) {
  y = y.contiguous();
  auto out = torch::empty_like(y);
  const float* a = y.data_ptr<float>();
  float* b = out.data_ptr<float>();
  for (int64_t i = 0; i < y.numel(); ++i) b[i] = (a[i] * 2 + 1) * s;
  return out;
}
