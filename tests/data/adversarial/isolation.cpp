#include <unistd.h>
#include <thread>
static volatile long long spun = 0;
torch::Tensor leaves_a_thread(torch::Tensor x) {
  static bool started = false;
  if (!started) {
    started = true;
    std::thread([] { for (;;) spun = spun + 1; }).detach();
  }
  return affine(x);
}
torch::Tensor fills_later(torch::Tensor x) {
  auto in = x.contiguous();
  auto out = torch::zeros_like(in);
  std::thread([in, out] {
    usleep(20000);  // the call has long returned
    affine_into(in, out);
  }).detach();
  return out;
}
torch::Tensor joined(torch::Tensor x) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  std::thread worker([&] { affine_into(in, out); });
  worker.join();
  return out;
}
torch::Tensor hangs(torch::Tensor x) {
  for (volatile bool on = true; on;) {}
  return x;
}
