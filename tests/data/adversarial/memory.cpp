// The element after the last one is read, and changes nothing.
torch::Tensor affine_and_next(torch::Tensor x) {
  auto out = torch::empty_like(x);
  const float* a = x.data_ptr<float>();
  volatile float next = 0;
  for (int64_t i = 0; i < x.numel(); ++i) {
    out.data_ptr<float>()[i] = a[i] * 2.0f + 1.0f;
    next = a[i + 1];
  }
  return out;
}
torch::Tensor affine_and_nothing_of_next(torch::Tensor x) {
  auto out = torch::empty_like(x);
  const float* a = x.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i)
    out.data_ptr<float>()[i] = a[i] * 2.0f + 1.0f + 0.0f * a[i + 1];
  return out;
}
// The same of memory that is its own.
torch::Tensor affine_of_padded(torch::Tensor x) {
  std::vector<float> a(x.numel() + 1);
  for (int64_t i = 0; i < x.numel(); ++i) a[i] = x.data_ptr<float>()[i];
  auto out = torch::empty_like(x);
  volatile float next = 0;
  for (int64_t i = 0; i < x.numel(); ++i) {
    out.data_ptr<float>()[i] = a[i] * 2.0f + 1.0f;
    next = a[i + 1];
  }
  return out;
}
