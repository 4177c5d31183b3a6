// The bodies that the lite headers only declare, and the factories of tensors, compiled once over those headers: instantiating std::optional
// for them cost every candidate 0.4 core-seconds. The factories (build.lite.COMMON) are generated, as a candidate's are, but not inline.
#include <torch/types.h>

// Only these are exported: lite's inline functions have torch's names, and would take the place of torch's in the shims.
#define KEPT __attribute__((visibility("default")))
namespace c10 {
KEPT std::optional<ScalarType> optTypeMetaToScalarType(std::optional<caffe2::TypeMeta> meta) {
  if (!meta.has_value()) return std::nullopt;
  return meta->toScalarType();
}
KEPT TensorOptions TensorOptions::device(std::optional<Device> device) const noexcept {
  TensorOptions r = *this;
  if ((r.has_device_ = device.has_value())) r.device_ = *device;
  return r;
}
KEPT TensorOptions TensorOptions::device_index(DeviceIndex index) const noexcept {
  TensorOptions r = *this;
  r.device_ = Device(DeviceType::CUDA, index);
  r.has_device_ = true;
  return r;
}
KEPT TensorOptions TensorOptions::dtype(std::optional<caffe2::TypeMeta> dtype) const noexcept {
  TensorOptions r = *this;
  if ((r.has_dtype_ = dtype.has_value())) r.dtype_ = *dtype;
  return r;
}
KEPT TensorOptions TensorOptions::dtype(std::optional<ScalarType> dtype) const noexcept {
  TensorOptions r = *this;
  if ((r.has_dtype_ = dtype.has_value())) r.dtype_ = scalarTypeToTypeMeta(*dtype);
  return r;
}
KEPT TensorOptions TensorOptions::layout(std::optional<Layout> layout) const noexcept {
  TensorOptions r = *this;
  if ((r.has_layout_ = layout.has_value())) r.layout_ = *layout;
  return r;
}
KEPT TensorOptions TensorOptions::requires_grad(std::optional<bool> flag) const noexcept {
  TensorOptions r = *this;
  if ((r.has_requires_grad_ = flag.has_value())) r.requires_grad_ = *flag;
  return r;
}
KEPT TensorOptions TensorOptions::pinned_memory(std::optional<bool> flag) const noexcept {
  TensorOptions r = *this;
  if ((r.has_pinned_memory_ = flag.has_value())) r.pinned_memory_ = *flag;
  return r;
}
KEPT TensorOptions TensorOptions::memory_format(std::optional<MemoryFormat> format) const noexcept {
  TensorOptions r = *this;
  if ((r.has_memory_format_ = format.has_value())) r.memory_format_ = *format;
  return r;
}
KEPT std::optional<Device> TensorOptions::device_opt() const noexcept { return has_device_ ? std::make_optional(device_) : std::nullopt; }
KEPT std::optional<caffe2::TypeMeta> TensorOptions::dtype_opt() const noexcept { return has_dtype_ ? std::make_optional(dtype_) : std::nullopt; }
KEPT std::optional<Layout> TensorOptions::layout_opt() const noexcept { return has_layout_ ? std::make_optional(layout_) : std::nullopt; }
KEPT std::optional<bool> TensorOptions::pinned_memory_opt() const noexcept { return has_pinned_memory_ ? std::make_optional(pinned_memory_) : std::nullopt; }
KEPT std::optional<MemoryFormat> TensorOptions::memory_format_opt() const noexcept { return has_memory_format_ ? std::make_optional(memory_format_) : std::nullopt; }
KEPT std::optional<bool> TensorOptions::requires_grad_opt() const noexcept { return has_requires_grad_ ? std::make_optional(requires_grad_) : std::nullopt; }
}  // namespace c10
