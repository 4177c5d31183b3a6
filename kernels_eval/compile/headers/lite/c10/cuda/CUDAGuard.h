// CUDAGuard and OptionalCUDAGuard over libc10_cuda.
#pragma once
#include <c10/cuda/CUDAStream.h>
namespace c10::cuda {
DeviceIndex ExchangeDevice(DeviceIndex device);
cudaError_t MaybeSetDevice(DeviceIndex device);
DeviceIndex current_device();
struct CUDAGuard {
  explicit CUDAGuard() = delete;
  explicit CUDAGuard(DeviceIndex index) : original_(index < 0 ? cuda::current_device() : ExchangeDevice(index)), current_(index < 0 ? original_ : index) {}
  explicit CUDAGuard(Device device) : CUDAGuard(concur_cuda_index(device)) {}
  CUDAGuard(const CUDAGuard&) = delete;
  CUDAGuard& operator=(const CUDAGuard&) = delete;
  CUDAGuard(CUDAGuard&&) = delete;
  CUDAGuard& operator=(CUDAGuard&&) = delete;
  ~CUDAGuard() { (void)MaybeSetDevice(original_); }
  Device original_device() const { return Device(DeviceType::CUDA, original_); }
  Device current_device() const { return Device(DeviceType::CUDA, current_); }

 private:
  static DeviceIndex concur_cuda_index(Device device) {
    TORCH_INTERNAL_ASSERT(device.type() == DeviceType::CUDA);
    return device.index();
  }
  DeviceIndex original_, current_;
};
struct OptionalCUDAGuard {
  explicit OptionalCUDAGuard() = default;
  explicit OptionalCUDAGuard(std::optional<Device> device) { if (device) guard_.emplace(*device); }
  explicit OptionalCUDAGuard(std::optional<DeviceIndex> index) { if (index) guard_.emplace(*index); }
  OptionalCUDAGuard(const OptionalCUDAGuard&) = delete;
  OptionalCUDAGuard& operator=(const OptionalCUDAGuard&) = delete;
  OptionalCUDAGuard(OptionalCUDAGuard&&) = delete;
  OptionalCUDAGuard& operator=(OptionalCUDAGuard&&) = delete;
  void reset() { guard_.reset(); }

 private:
  std::optional<CUDAGuard> guard_;
};
}  // namespace c10::cuda
