// The current stream, from libc10_cuda.
#pragma once
#include <c10/cuda/CUDAException.h>
namespace c10 {
class Stream final {  // layout of torch's: device, then an id
 public:
  Device device() const noexcept { return device_; }
 private:
  Device device_;
  int64_t id_;
};
}  // namespace c10
namespace c10::cuda {
class CUDAStream {
 public:
  operator cudaStream_t() const { return stream(); }
  DeviceIndex device_index() const { return stream_.device().index(); }
  Device device() const { return Device(DeviceType::CUDA, device_index()); }
  void synchronize() const { C10_CUDA_CHECK(cudaStreamSynchronize(stream())); }
  cudaStream_t stream() const;
 private:
  Stream stream_;
};
CUDAStream getDefaultCUDAStream(DeviceIndex device_index = -1);
CUDAStream getCurrentCUDAStream(DeviceIndex device_index = -1);
}  // namespace c10::cuda
