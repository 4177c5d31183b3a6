// at::Tensor: one owning pointer, as torch's. Metadata is read where the shim says it is, item<T> comes from libtorch,
// operators from the generated files.
#pragma once

namespace concur {
// `impl` is a c10::TensorImpl; nothing here takes or gives up a reference unless its name says so.
extern void* const undefined;
void retain(void* impl) noexcept;
void release(void* impl) noexcept;
int64_t size(const void* impl, int64_t dim);
int64_t stride(const void* impl, int64_t dim);
// Where an impl keeps its fields, in bytes. They are read here, as torch's own headers do: a call for each turn of a loop would make it
// several times slower.
extern const int64_t numel_at, sizes_at, offset_at, dtype_at, device_at;
constexpr int64_t held_inside = 5;  // more dimensions than that lie elsewhere
template <class T> inline const T& field(const void* impl, int64_t at) {
  return *reinterpret_cast<const T*>(static_cast<const char*>(impl) + at);
}
inline int64_t numel(const void* impl) { return field<int64_t>(impl, numel_at); }
inline int64_t dim(const void* impl) { return field<int64_t>(impl, sizes_at); }
inline const int64_t* extents(const void* impl, bool strides) {
  const int64_t dims = dim(impl);
  if (C10_UNLIKELY(dims > held_inside)) return field<const int64_t*>(impl, sizes_at + 8) + (strides ? dims : 0);
  return &field<int64_t>(impl, sizes_at + 8) + (strides ? held_inside : 0);
}
inline int64_t extent(const void* impl, int64_t dim, bool is_stride) {
  const int64_t dims = concur::dim(impl), place = dim < 0 ? dim + dims : dim;
  if (C10_UNLIKELY(place < 0 || place >= dims)) return is_stride ? stride(impl, dim) : size(impl, dim);
  return extents(impl, is_stride)[place];
}
inline bool has_device(const void* impl) { return field<bool>(impl, device_at + sizeof(c10::Device)); }
inline bool is_on(const void* impl, c10::DeviceType type) { return has_device(impl) && field<c10::DeviceType>(impl, device_at) == type; }
size_t itemsize(const void* impl);
size_t use_count(const void* impl);
bool is_contiguous(const void* impl, c10::MemoryFormat format);
bool is_kind(const void* impl, int kind);
c10::Device device(const void* impl);
c10::Layout layout(const void* impl);
c10::TensorOptions options(const void* impl);
void* data(const void* impl, bool mutates);
void* data(const void* impl, bool mutates, c10::ScalarType type);  // throws torch's error where the tensor has another one
// These make a tensor in `out`, which is storage of one pointer; `x` and `y` point to tensors or scalars.
void contiguous(void* out, const void* x, c10::MemoryFormat format);
void select(void* out, const void* x, int64_t index);
void binary(void* out, int operation, const void* x, bool x_is_tensor, const void* y, bool y_is_tensor);
void in_place(void* x, int operation, const void* y, bool y_is_tensor);
void negated(void* out, const void* x, bool bitwise);
void moved(void* out, const void* x, c10::DeviceType type);
void cast(void* out, const void* x, c10::ScalarType type);
void assign(void* x, const void* y, bool y_is_tensor);  // x.copy_(y) or x.fill_(y)
void index_by(void* out, const void* x, const void* y, bool y_is_tensor);
void make_variable(void* tensor, bool requires_grad);
struct TypeProperties { int backend; c10::ScalarType type; };
TypeProperties* properties(const void* impl);
bool properties_are_cuda(const TypeProperties* properties);
c10::TensorOptions properties_options(const TypeProperties* properties);
struct Uninitialised {};
void enter_below_autograd(void* state);
void leave_below_autograd(void* state);
}  // namespace concur

namespace at {
using c10::ArrayRef;
class Tensor;
using TensorList = ArrayRef<Tensor>;

// What operators may mention and candidates may not make: an overload with one of these is there, and deleted.
class Generator { Generator(); };
class Storage { Storage(); };
class Dimname { Dimname(); };
using DimnameList = ArrayRef<Dimname>;
class Stream { Stream(); };

class DeprecatedTypeProperties {
 public:
  bool is_cuda() const { return concur::properties_are_cuda(&all); }
  ScalarType scalarType() const { return all.type; }
  operator TensorOptions() const { return concur::properties_options(&all); }
  DeprecatedTypeProperties(const DeprecatedTypeProperties&) = default;
 private:
  concur::TypeProperties all;
};

class TensorBase {
 public:
  TensorBase() : impl_(concur::undefined) {}
  TensorBase(const TensorBase& other) : impl_(other.impl_) { concur::retain(impl_); }
  TensorBase(TensorBase&& other) noexcept : impl_(other.impl_) { other.impl_ = concur::undefined; }
  ~TensorBase() noexcept { if (defined()) concur::release(impl_); }
  TensorBase& operator=(const TensorBase& other) & { concur::retain(other.impl_); concur::release(impl_); impl_ = other.impl_; return *this; }
  TensorBase& operator=(TensorBase&& other) & noexcept {
    if (this != &other) { if (defined()) concur::release(impl_); impl_ = other.impl_; other.impl_ = concur::undefined; }
    return *this;
  }
  TensorBase& operator=(const TensorBase&) && = delete;
  TensorBase& operator=(TensorBase&&) && noexcept = delete;

  bool defined() const { return impl_ != concur::undefined; }
  void reset() { concur::release(impl_); impl_ = concur::undefined; }
  bool is_same(const TensorBase& other) const noexcept { return impl_ == other.impl_; }
  size_t use_count() const noexcept { return concur::use_count(impl_); }
  int64_t dim() const { return concur::dim(impl_); }
  int64_t ndimension() const { return dim(); }
  int64_t numel() const { return concur::numel(impl_); }
  int64_t storage_offset() const { return concur::field<int64_t>(impl_, concur::offset_at); }
  int64_t size(int64_t dim) const { return concur::extent(impl_, dim, false); }
  int64_t stride(int64_t dim) const { return concur::extent(impl_, dim, true); }
  IntArrayRef sizes() const { return IntArrayRef(concur::extents(impl_, false), dim()); }
  IntArrayRef strides() const { return IntArrayRef(concur::extents(impl_, true), dim()); }
  size_t itemsize() const { return concur::itemsize(impl_); }
  int64_t element_size() const { return static_cast<int64_t>(concur::itemsize(impl_)); }
  size_t nbytes() const { return numel() * itemsize(); }
  bool is_contiguous(MemoryFormat format = MemoryFormat::Contiguous) const { return concur::is_contiguous(impl_, format); }
  ScalarType scalar_type() const { return dtype().toScalarType(); }
  caffe2::TypeMeta dtype() const { return concur::field<caffe2::TypeMeta>(impl_, concur::dtype_at); }
  Device device() const {
    if (C10_UNLIKELY(!concur::has_device(impl_))) return concur::device(impl_);  // throws
    return concur::field<Device>(impl_, concur::device_at);
  }
  Layout layout() const { return concur::layout(impl_); }
  TensorOptions options() const { return concur::options(impl_); }
  DeviceIndex get_device() const { return device().index(); }
  bool is_cpu() const { return concur::is_on(impl_, DeviceType::CPU); }
  bool is_cuda() const { return concur::is_on(impl_, DeviceType::CUDA); }
  bool is_sparse() const { return concur::is_kind(impl_, 0); }
  bool is_complex() const { return concur::is_kind(impl_, 1); }
  bool is_floating_point() const { return concur::is_kind(impl_, 2); }
  bool is_signed() const { return concur::is_kind(impl_, 3); }
  bool requires_grad() const { return concur::is_kind(impl_, 4); }
  bool is_quantized() const { return concur::is_kind(impl_, 5); }
  bool is_meta() const { return concur::is_on(impl_, DeviceType::Meta); }

  const void* const_data_ptr() const { return concur::data(impl_, false); }
  void* mutable_data_ptr() const { return concur::data(impl_, true); }
  void* data_ptr() const { return mutable_data_ptr(); }
  template <typename T> const T* const_data_ptr() const {
    return static_cast<const T*>(concur::data(impl_, false, concur::scalar_of<std::remove_const_t<T>>::value));
  }
  template <typename T> T* mutable_data_ptr() const { return static_cast<T*>(concur::data(impl_, true, concur::scalar_of<T>::value)); }
  template <typename T> T* data_ptr() const { return mutable_data_ptr<T>(); }

 protected:
  explicit TensorBase(concur::Uninitialised) {}
  void* impl_;
};

#ifdef CONCUR_ACCESSOR
}  // namespace at
#include <concur/accessor.h>
namespace at {
#endif

namespace _ops {
#include "concur_calls.inc"
}  // namespace _ops

class Tensor : public TensorBase {
 public:
  Tensor() = default;
  Tensor(const Tensor&) = default;
  Tensor(Tensor&&) = default;
  explicit Tensor(const TensorBase& base) : TensorBase(base) {}
  Tensor(TensorBase&& base) : TensorBase(std::move(base)) {}

  Tensor& operator=(const TensorBase& x) & noexcept { TensorBase::operator=(x); return *this; }
  Tensor& operator=(TensorBase&& x) & noexcept { TensorBase::operator=(std::move(x)); return *this; }
  Tensor& operator=(const Tensor& x) & noexcept { return operator=(static_cast<const TensorBase&>(x)); }
  Tensor& operator=(Tensor&& x) & noexcept { return operator=(static_cast<TensorBase&&>(x)); }
  Tensor& operator=(const Scalar& v) && { concur::assign(this, &v, false); return *this; }
  Tensor& operator=(const Tensor& rhs) && { concur::assign(this, &rhs, true); return *this; }
  Tensor& operator=(Tensor&& rhs) && { concur::assign(this, &rhs, true); return *this; }

  Tensor contiguous(MemoryFormat format = MemoryFormat::Contiguous) const { Tensor r(concur::Uninitialised{}); concur::contiguous(&r, this, format); return r; }
  DeprecatedTypeProperties& type() const { return *reinterpret_cast<DeprecatedTypeProperties*>(concur::properties(impl_)); }
  Tensor toType(ScalarType t) const { Tensor r(concur::Uninitialised{}); concur::cast(&r, this, t); return r; }
  Tensor cpu() const { Tensor r(concur::Uninitialised{}); concur::moved(&r, this, DeviceType::CPU); return r; }
  Tensor cuda() const { Tensor r(concur::Uninitialised{}); concur::moved(&r, this, DeviceType::CUDA); return r; }
  template <typename T> T* data() const { return data_ptr<T>(); }
  template <typename T> T item() const;
  using TensorBase::size;
  using TensorBase::stride;

#ifdef CONCUR_ACCESSOR
  CONCUR_ACCESSORS
#endif

  Tensor operator~() const { Tensor r(concur::Uninitialised{}); concur::negated(&r, this, true); return r; }
  Tensor operator-() const { Tensor r(concur::Uninitialised{}); concur::negated(&r, this, false); return r; }
#define CONCUR_IN_PLACE(op, code) \
  Tensor& operator op(const Tensor& y) { concur::in_place(this, code, &y, true); return *this; } \
  Tensor& operator op(const Scalar& y) { concur::in_place(this, code, &y, false); return *this; }
  CONCUR_IN_PLACE(+=, 0) CONCUR_IN_PLACE(-=, 1) CONCUR_IN_PLACE(*=, 2) CONCUR_IN_PLACE(/=, 3)
#undef CONCUR_IN_PLACE
  Tensor operator[](const Scalar& index) const { Tensor r(concur::Uninitialised{}); concur::index_by(&r, this, &index, false); return r; }
  Tensor operator[](const Tensor& index) const { Tensor r(concur::Uninitialised{}); concur::index_by(&r, this, &index, true); return r; }
  Tensor operator[](int64_t index) const { Tensor r(concur::Uninitialised{}); concur::select(&r, this, index); return r; }

#include "concur_methods.inc"

 private:
  explicit Tensor(concur::Uninitialised u) : TensorBase(u) {}
  friend struct concur_access;
};

struct concur_access { static Tensor raw() { return Tensor(concur::Uninitialised{}); } };

#define CONCUR_BINARY(op, code) \
  inline Tensor operator op(const Tensor& x, const Tensor& y) { Tensor r = concur_access::raw(); concur::binary(&r, code, &x, true, &y, true); return r; } \
  inline Tensor operator op(const Tensor& x, const Scalar& y) { Tensor r = concur_access::raw(); concur::binary(&r, code, &x, true, &y, false); return r; } \
  inline Tensor operator op(const Scalar& x, const Tensor& y) { Tensor r = concur_access::raw(); concur::binary(&r, code, &x, false, &y, true); return r; }
CONCUR_BINARY(+, 0) CONCUR_BINARY(-, 1) CONCUR_BINARY(*, 2) CONCUR_BINARY(/, 3)
CONCUR_BINARY(<, 4) CONCUR_BINARY(<=, 5) CONCUR_BINARY(>, 6) CONCUR_BINARY(>=, 7) CONCUR_BINARY(==, 8) CONCUR_BINARY(!=, 9)
#undef CONCUR_BINARY

struct AutoDispatchBelowADInplaceOrView {  // what torch's own factories hold while they call at::empty and the like
  AutoDispatchBelowADInplaceOrView() { concur::enter_below_autograd(state_); }
  ~AutoDispatchBelowADInplaceOrView() { concur::leave_below_autograd(state_); }
 private:
  alignas(8) char state_[32];
};
}  // namespace at

namespace torch::autograd {
inline at::Tensor make_variable(at::Tensor data, bool requires_grad) { concur::make_variable(&data, requires_grad); return data; }
}  // namespace torch::autograd

#include "concur_ops.inc"
