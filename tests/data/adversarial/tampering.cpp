#include <chrono>
#include <cstdio>
// What an honest kernel may do: look at the clock for itself.
torch::Tensor affine_with_stopwatch(torch::Tensor x) {
  const auto started = std::chrono::steady_clock::now();
  auto out = affine(x);
  if (std::chrono::steady_clock::now() < started) std::fprintf(stderr, "time runs backwards\n");
  return out;
}
