extern "C" int cublasCreate_v2(void**);
extern "C" int cublasSgemm_v2(void*, int, int, int, int, int, const float*, const float*, int,
    const float*, int, const float*, float*, int);
torch::Tensor product(torch::Tensor x, torch::Tensor w) {
  static void* handle = nullptr;
  if (!handle) cublasCreate_v2(&handle);
  auto a = x.contiguous(), b = w.contiguous();
  auto y = torch::empty({a.size(0), b.size(1)}, a.options());
  const int rows = a.size(0), inner = a.size(1), columns = b.size(1);
  const float one = 1.0f, zero = 0.0f;
  cublasSgemm_v2(handle, 0, 0, columns, rows, inner, &one, b.data_ptr<float>(), columns,
      a.data_ptr<float>(), inner, &zero, y.data_ptr<float>(), columns);
  return y;
}
