#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>
#include <memory>
torch::Tensor own_product(torch::Tensor x, torch::Tensor w) {
  auto in = x.contiguous(), weight = w.contiguous();
  const int64_t rows = in.size(0), inner = in.size(1), columns = weight.size(1);
  auto out = torch::empty({rows, columns}, in.options());
  const float *a = in.data_ptr<float>(), *b = weight.data_ptr<float>();
  float* c = out.data_ptr<float>();
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < inner; ++k) sum += (double)a[i * inner + k] * b[k * columns + j];
      c[i * columns + j] = (float)sum;
    }
  return out;
}
static std::unique_ptr<torch::Library> registered;
static torch::Tensor product(const torch::Tensor& x, const torch::Tensor& w) {
  return torch::mm(x, w);
}
// Other code for an operator of torch's own: what it calls is then done inside of that operator.
int64_t replace_an_operator() {
  registered = std::make_unique<torch::Library>(torch::Library::IMPL, "aten",
      c10::DispatchKey::CPU, __FILE__, __LINE__);
  registered->impl("heaviside", product);
  return 0;
}
static c10::RegistrationHandleRAII* kept;
int64_t replace_by_the_dispatcher() {
  auto& all = c10::Dispatcher::singleton();
  kept = new c10::RegistrationHandleRAII(all.registerImpl({"aten::heaviside", ""}, c10::DispatchKey::CPU,
      c10::KernelFunction::makeFromUnboxedRuntimeFunction(&product), std::nullopt, nullptr, "x"));
  return 0;
}
torch::Tensor step_of(torch::Tensor x, torch::Tensor w) { return torch::heaviside(x, w); }
// A fallback for a key that nobody uses otherwise.
constexpr auto KEY = c10::DispatchKey::PrivateUse2;
static void product_instead(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKeySet(c10::BackendComponent::PrivateUse2Bit));
  auto w = stack->back().toTensor();
  stack->pop_back();
  stack->back() = torch::mm(stack->back().toTensor(), w);
}
int64_t fall_back() {
  registered = std::make_unique<torch::Library>(torch::Library::IMPL, "_", KEY, __FILE__, __LINE__);
  registered->fallback(torch::CppFunction::makeFromBoxedFunction<&product_instead>());
  return 0;
}
torch::Tensor stepped(torch::Tensor x, torch::Tensor w) { return torch::mm(x, w); }
// Honest: an operator of a namespace of its own, once, as Python keeps what it has found of it.
int64_t register_its_own() {
  if (registered) return 0;
  registered = std::make_unique<torch::Library>(torch::Library::FRAGMENT, "adversarial_listed",
      std::nullopt, __FILE__, __LINE__);
  registered->def("product(Tensor x, Tensor w) -> Tensor");
  registered->impl("product", c10::DispatchKey::CPU, TORCH_FN(own_product));
  return 0;
}
