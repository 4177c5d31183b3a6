#include <ATen/CPUFunctions.h>
torch::Tensor product_below(torch::Tensor x, torch::Tensor w) { return at::cpu::mm(x, w); }
torch::Tensor product_guarded(torch::Tensor x, torch::Tensor w) {
  c10::impl::ExcludeDispatchKeyGuard python(c10::DispatchKey::Python);
  return torch::mm(x, w);
}
