#include <ATen/CPUFunctions.h>
#include <thread>
extern "C" void sgemm_(const char*, const char*, const int*, const int*, const int*, const float*,
    const float*, const int*, const float*, const int*, const float*, float*, const int*);
torch::Tensor product_by_blas(torch::Tensor x, torch::Tensor w) {
  auto a = x.contiguous(), b = w.contiguous();
  auto out = torch::empty({a.size(0), b.size(1)}, a.options());
  const int columns = b.size(1), rows = a.size(0), inner = a.size(1);
  const float one = 1.0f, zero = 0.0f;
  sgemm_("N", "N", &columns, &rows, &inner, &one, b.data_ptr<float>(), &columns,
      a.data_ptr<float>(), &inner, &zero, out.data_ptr<float>(), &columns);
  return out;
}
torch::Tensor product_below(torch::Tensor x, torch::Tensor w) { return at::cpu::mm(x, w); }
torch::Tensor product_guarded(torch::Tensor x, torch::Tensor w) {
  c10::impl::ExcludeDispatchKeyGuard python(c10::DispatchKey::Python);
  return torch::mm(x, w);
}
torch::Tensor product_in_a_thread(torch::Tensor x, torch::Tensor w) {
  torch::Tensor out;
  std::thread([&] {
    at::NoGradGuard guard;
    out = torch::mm(x, w);
  }).join();
  return out;
}
