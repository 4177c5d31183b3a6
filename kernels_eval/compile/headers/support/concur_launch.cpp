// Counts, checks, nulls and times the kernel launches of candidates' libraries. They are linked with --wrap for the runtime calls that
// launch (CUDA 13's stubs make __cudaLaunchKernel with a handle from __cudaGetKernel, CUDA 12's cudaLaunchKernel) and the one that
// registers a kernel's name, so theirs come here first; launches of torch, cuBLAS and the rest do not.
// Guarantees: every launch through those calls is counted under its kernel's name. Does not guarantee to see launches by other means
// (the driver API, a graph, a pointer from dlsym), nor that native code beside it leaves these counters alone.
#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {
std::mutex guard;
std::map<const void*, std::string> names;     // of kernels, by the address of their host stub
std::map<const void*, const void*> stubs;     // by the runtime's handle, where launches name that
std::map<const void*, long> counts;           // by the address of the stub
long total = 0, off_stream = 0;
cudaStream_t expected = nullptr;
bool expects = false, skips = false, times = false;
std::vector<std::pair<cudaEvent_t, cudaEvent_t>> timed;  // events of launches not yet waited for
double waited_ms = 0;

void forget_events() {
  for (auto& [from, to] : timed) { cudaEventDestroy(from); cudaEventDestroy(to); }
  timed.clear();
}

template <class Launch> cudaError_t launch(const void* kernel, cudaStream_t stream, Launch&& through) {
  std::pair<cudaEvent_t, cudaEvent_t> events{};
  bool measure;
  {
    std::lock_guard<std::mutex> hold(guard);
    auto stub = stubs.find(kernel);
    ++counts[stub == stubs.end() ? kernel : stub->second];
    ++total;
    if (expects && stream != expected) ++off_stream;
    if (skips) return cudaSuccess;
    measure = times;
  }
  if (!measure) return through();
  if (cudaEventCreate(&events.first) != cudaSuccess || cudaEventCreate(&events.second) != cudaSuccess) return through();
  cudaEventRecord(events.first, stream);
  cudaError_t result = through();
  cudaEventRecord(events.second, stream);
  std::lock_guard<std::mutex> hold(guard);
  timed.push_back(events);
  return result;
}

std::string readable(const void* kernel) {
  auto known = names.find(kernel);
  if (known == names.end()) return "unknown";
  int status = 0;
  char* plain = abi::__cxa_demangle(known->second.c_str(), nullptr, nullptr, &status);
  std::string result = status == 0 && plain ? plain : known->second;
  std::free(plain);
  return result;
}
}  // namespace

extern "C" {
// Internal to the runtime, so declared here; weak, since not every version has each.
__attribute__((weak)) cudaError_t __cudaGetKernel(void** handle, const void* stub);
__attribute__((weak)) cudaError_t __cudaLaunchKernel(void* handle, dim3, dim3, void**, size_t, cudaStream_t);
__attribute__((weak)) cudaError_t __cudaLaunchKernel_ptsz(void* handle, dim3, dim3, void**, size_t, cudaStream_t);
void __cudaRegisterFunction(void** binary, const char* stub, char* device, const char* name, int, void*, void*, void*, void*, int*);

void __wrap___cudaRegisterFunction(
    void** binary, const char* stub, char* device, const char* name, int limit, void* tid, void* bid, void* block, void* grid, int* warp) {
  { std::lock_guard<std::mutex> hold(guard); names[stub] = name; }
  __cudaRegisterFunction(binary, stub, device, name, limit, tid, bid, block, grid, warp);
}

cudaError_t __wrap___cudaGetKernel(void** handle, const void* stub) {
  cudaError_t result = __cudaGetKernel(handle, stub);
  std::lock_guard<std::mutex> hold(guard);
  if (result == cudaSuccess) stubs[*handle] = stub;
  return result;
}

cudaError_t __wrap___cudaLaunchKernel(void* kernel, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t stream) {
  return launch(kernel, stream, [&] { return __cudaLaunchKernel(kernel, grid, block, args, shared, stream); });
}

cudaError_t __wrap___cudaLaunchKernel_ptsz(void* kernel, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t stream) {
  return launch(kernel, stream ? stream : cudaStreamPerThread, [&] { return __cudaLaunchKernel_ptsz(kernel, grid, block, args, shared, stream); });
}

cudaError_t __wrap_cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t stream) {
  return launch(kernel, stream, [&] { return cudaLaunchKernel(kernel, grid, block, args, shared, stream); });
}

cudaError_t __wrap_cudaLaunchCooperativeKernel(const void* kernel, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t stream) {
  return launch(kernel, stream, [&] { return cudaLaunchCooperativeKernel(kernel, grid, block, args, shared, stream); });
}

cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** args) {
  return launch(kernel, config->stream, [&] { return cudaLaunchKernelExC(config, kernel, args); });
}

void concur_launch_reset() {
  std::lock_guard<std::mutex> hold(guard);
  counts.clear();
  total = off_stream = 0;
  waited_ms = 0;
  forget_events();
}

// `null`: launches are counted and not made. `timed`: each is put between two events.
void concur_launch_mode(int null, int timed_launches) {
  std::lock_guard<std::mutex> hold(guard);
  skips = null != 0;
  times = timed_launches != 0;
}

void concur_launch_expect_stream(void* stream) {
  std::lock_guard<std::mutex> hold(guard);
  expected = static_cast<cudaStream_t>(stream);
  expects = true;
}

long concur_launch_total() { std::lock_guard<std::mutex> hold(guard); return total; }
long concur_launch_off_stream() { std::lock_guard<std::mutex> hold(guard); return off_stream; }

// Milliseconds between the events of all launches since the reset; waits for those launches to end.
double concur_launch_ms() {
  std::lock_guard<std::mutex> hold(guard);
  for (auto& [from, to] : timed) {
    float ms = 0;
    if (cudaEventSynchronize(to) == cudaSuccess && cudaEventElapsedTime(&ms, from, to) == cudaSuccess) waited_ms += ms;
  }
  forget_events();
  return waited_ms;
}

// Writes "name\tcount\n" a kernel, as many whole lines as fit, and a closing NUL. Returns the size that all lines need, NUL included.
long concur_launch_names(char* buffer, long size) {
  std::map<std::string, long> named;
  {
    std::lock_guard<std::mutex> hold(guard);
    for (auto& [kernel, count] : counts) named[readable(kernel)] += count;
  }
  long used = 0, needed = 1;
  for (auto& [name, count] : named) {
    std::string line = name + "\t" + std::to_string(count) + "\n";
    needed += static_cast<long>(line.size());
    if (buffer && used + static_cast<long>(line.size()) < size) {
      std::memcpy(buffer + used, line.data(), line.size());
      used += static_cast<long>(line.size());
    }
  }
  if (buffer && size > 0) buffer[used] = 0;
  return needed;
}
}  // extern "C"
