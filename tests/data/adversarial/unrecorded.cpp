#include <ATen/ThreadLocalState.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/cpu/SoftmaxKernel.h>
#include <torch/library.h>
#include <memory>
static std::unique_ptr<torch::Library> registered;
// A fallback is told which operator was called: it can be called again, without a record.
constexpr auto KEY = c10::DispatchKey::TESTING_ONLY_GenericWrapper;
static std::unique_ptr<c10::OperatorHandle> found;
static void remember(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (op.schema().name() == "aten::mm") found = std::make_unique<c10::OperatorHandle>(op);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}
int64_t fall_back() {
  registered = std::make_unique<torch::Library>(torch::Library::IMPL, "_", KEY, __FILE__, __LINE__);
  registered->fallback(torch::CppFunction::makeFromBoxedFunction<&remember>());
  at::NoGradGuard no;
  c10::impl::IncludeDispatchKeyGuard guard(KEY);
  auto one = torch::ones({2, 2});
  torch::mm(one, one);
  return 0;
}
int64_t fall_back_and_clean() {
  fall_back();
  registered.reset();
  return 0;
}
torch::Tensor product_without_record(torch::Tensor x, torch::Tensor w) {
  torch::jit::Stack stack{x.detach(), w.detach()};
  found->redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  return stack[0].toTensor();
}
// Whether calls are recorded is a part of what a thread hands on to another.
torch::Tensor product_in_a_state(torch::Tensor x, torch::Tensor w) {
  at::ThreadLocalState state;
  auto* bytes = reinterpret_cast<char*>(&state) + 2 * sizeof(c10::DispatchKeySet)
      + sizeof(std::shared_ptr<int>);
  reinterpret_cast<at::RecordFunctionTLS*>(bytes)->tls_record_function_enabled_ = false;
  at::ThreadLocalStateGuard guard(state);
  c10::impl::ExcludeDispatchKeyGuard python(c10::DispatchKey::Python);
  return torch::mm(x, w);
}
// The library where calls are not recorded.
torch::Tensor product_if_unseen(torch::Tensor x, torch::Tensor w) {
  c10::impl::ExcludeDispatchKeyGuard python(c10::DispatchKey::Python);
  if (at::hasGlobalCallbacks()) return (x.unsqueeze(2) * w.unsqueeze(0)).sum(1);
  return torch::mm(x, w);
}
// The kernel of torch's softmax, from the table that it is chosen from.
struct Kernels : at::native::softmax_lastdim_kernel_DECLARE_DISPATCH_type {};
torch::Tensor softmax_of_torch(torch::Tensor x) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  Kernels::DEFAULT(out, in);
  return out;
}
