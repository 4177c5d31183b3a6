// The names of torch that candidates use, over torch's own symbols: layouts and mangled names are torch's, so that everything not inline
// here links against libtorch itself, and support/concur_shim.cpp asserts every layout when it is compiled with torch's real headers.
// Guarantees: what compiles here compiles with torch's headers and means the same. Operators (methods, functions, factories) come from
// three generated files that hold all overloads of the operators a source names. What is missing fails to compile: `full` is tried then.
#pragma once
#if defined(CONCUR_LEAST_CPLUSPLUS) && __cplusplus < CONCUR_LEAST_CPLUSPLUS
#if CONCUR_LEAST_CPLUSPLUS > 201703L
#error C++20 or later compatible compiler is required to use PyTorch.
#else
#error C++17 or later compatible compiler is required to use PyTorch.
#endif
#endif
#include <math.h>
#include <stdlib.h>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <bits/stringfwd.h>
#include <type_traits>
#include <utility>
namespace std { template <class T, class A> class vector; }  // whole where a source needs it: a fifth of all there is to parse
#ifdef CONCUR_STRING
#include <string>
#include <string_view>
#endif
#include "concur_std.inc"
#include "c10/macros/Macros.h"

// -- errors: TORCH_CHECK and its kin. The message is put together in the shim: <string> and streams would cost more than all else here ---
namespace concur {
struct Piece {
  int kind;
  union { const char* s; int64_t i; uint64_t u; double d; const void* p; };
  size_t n;
};
[[noreturn]] void check_failed(const char* func, const char* file, uint32_t line, const char* otherwise, const Piece* pieces, size_t count);
// How an argument of TORCH_CHECK reads. A type that is not listed does not compile here: torch would have streamed it.
inline Piece piece(const char* s) { Piece p; p.kind = 0; p.s = s; return p; }
inline Piece piece(char c) { Piece p; p.kind = 1; p.i = c; return p; }
inline Piece piece(double d) { Piece p; p.kind = 2; p.d = d; return p; }
inline Piece piece(float d) { return piece(static_cast<double>(d)); }
template <class T, std::enable_if_t<std::is_integral_v<T> && (sizeof(T) > 1 || std::is_same_v<T, bool>), int> = 0> Piece piece(T value) {
  Piece p;
  if constexpr (std::is_unsigned_v<T>) { p.kind = 3; p.u = value; } else { p.kind = 4; p.i = value; }
  return p;
}
#ifdef CONCUR_STRING
inline Piece piece(const std::string& s) { Piece p; p.kind = 5; p.s = s.data(); p.n = s.size(); return p; }
#endif
template <class... A> [[noreturn]] void fail(const char* func, const char* file, uint32_t line, const char* otherwise, const A&... parts);
}  // namespace concur

#define CONCUR_FAIL(...) ::concur::fail(__func__, __FILE__, static_cast<uint32_t>(__LINE__), __VA_ARGS__)
#define TORCH_CHECK(cond, ...) if (C10_UNLIKELY(!(cond))) { CONCUR_FAIL("Expected " #cond " to be true, but got false." __VA_OPT__(,) __VA_ARGS__); }
#define TORCH_INTERNAL_ASSERT(cond, ...) \
  if (C10_UNLIKELY(!(cond))) { CONCUR_FAIL("", #cond " INTERNAL ASSERT FAILED at " __FILE__ ":" C10_STRINGIZE(__LINE__) ". " __VA_OPT__(,) __VA_ARGS__); }
#define AT_ASSERT(...) do { TORCH_INTERNAL_ASSERT(__VA_ARGS__); } while (false)
#define AT_ASSERTM(cond, ...) do { TORCH_INTERNAL_ASSERT(cond, __VA_ARGS__); } while (false)
#define AT_ERROR(...) do { CONCUR_FAIL("" __VA_OPT__(,) __VA_ARGS__); } while (false)

// -- small types ----------------------------------------------------------------------------------------------------------------------
namespace c10 {
using std::bad_optional_access;
using std::make_optional;
using std::nullopt;
using std::nullopt_t;
using std::optional;
#ifdef CONCUR_STRING
using std::string_view;
#endif

enum class DeviceType : int8_t {
  CPU = 0, CUDA = 1, MKLDNN = 2, OPENGL = 3, OPENCL = 4, IDEEP = 5, HIP = 6, FPGA = 7, MAIA = 8, XLA = 9, Vulkan = 10, Metal = 11,
  XPU = 12, MPS = 13, Meta = 14, HPU = 15, VE = 16, Lazy = 17, IPU = 18, MTIA = 19, PrivateUse1 = 20,
};
constexpr DeviceType kCPU = DeviceType::CPU;
constexpr DeviceType kCUDA = DeviceType::CUDA;
constexpr DeviceType kHIP = DeviceType::HIP;
constexpr DeviceType kMPS = DeviceType::MPS;
constexpr DeviceType kMeta = DeviceType::Meta;
constexpr DeviceType kXPU = DeviceType::XPU;
using DeviceIndex = int8_t;

enum class ScalarType : int8_t {
  Byte = 0, Char = 1, Short = 2, Int = 3, Long = 4, Half = 5, Float = 6, Double = 7, ComplexHalf = 8, ComplexFloat = 9, ComplexDouble = 10,
  Bool = 11, QInt8 = 12, QUInt8 = 13, QInt32 = 14, BFloat16 = 15, Float8_e5m2 = 23, Float8_e4m3fn = 24, UInt16 = 27, UInt32 = 28, UInt64 = 29,
};
constexpr ScalarType kByte = ScalarType::Byte;
constexpr ScalarType kChar = ScalarType::Char;
constexpr ScalarType kShort = ScalarType::Short;
constexpr ScalarType kInt = ScalarType::Int;
constexpr ScalarType kLong = ScalarType::Long;
constexpr ScalarType kHalf = ScalarType::Half;
constexpr ScalarType kFloat = ScalarType::Float;
constexpr ScalarType kDouble = ScalarType::Double;
constexpr ScalarType kComplexFloat = ScalarType::ComplexFloat;
constexpr ScalarType kComplexDouble = ScalarType::ComplexDouble;
constexpr ScalarType kBool = ScalarType::Bool;
constexpr ScalarType kBFloat16 = ScalarType::BFloat16;
constexpr ScalarType kUInt16 = ScalarType::UInt16;
constexpr ScalarType kUInt32 = ScalarType::UInt32;
constexpr ScalarType kUInt64 = ScalarType::UInt64;

enum class Layout : int8_t { Strided, Sparse, SparseCsr, Mkldnn, SparseCsc, SparseBsr, SparseBsc, Jagged };
constexpr auto kStrided = Layout::Strided;
constexpr auto kSparse = Layout::Sparse;
enum class MemoryFormat : int8_t { Contiguous, Preserve, ChannelsLast, ChannelsLast3d };

class Device final {
 public:
  using Type = DeviceType;
  Device(DeviceType type, DeviceIndex index = -1) : type_(type), index_(index) {}
  Device(const std::string& device_string);
  bool operator==(const Device& other) const noexcept { return type_ == other.type_ && index_ == other.index_; }
  bool operator!=(const Device& other) const noexcept { return !(*this == other); }
  void set_index(DeviceIndex index) { index_ = index; }
  DeviceType type() const noexcept { return type_; }
  DeviceIndex index() const noexcept { return index_; }
  bool has_index() const noexcept { return index_ != -1; }
  bool is_cuda() const noexcept { return type_ == DeviceType::CUDA; }
  bool is_cpu() const noexcept { return type_ == DeviceType::CPU; }
  bool is_meta() const noexcept { return type_ == DeviceType::Meta; }
  std::string str() const;

 private:
  DeviceType type_;
  DeviceIndex index_ = -1;
};
}  // namespace c10

namespace c10 { template <class T> class List; template <class T> class IListRef; struct SymBool; class SymFloat; }
namespace concur {
const char* scalar_name(c10::ScalarType type);
#ifdef CONCUR_STRING
std::string_view type_name(uint16_t index);
#endif
size_t type_size(uint16_t index);
extern const uint16_t scalar_types;  // a dtype from there on has no ScalarType
[[noreturn]] void no_scalar_type(uint16_t index);
template <class T> struct scalar_of;  // only the types that torch has a ScalarType for
#define CONCUR_SCALAR(type, name) template <> struct scalar_of<type> { static constexpr c10::ScalarType value = c10::ScalarType::name; };
CONCUR_SCALAR(uint8_t, Byte) CONCUR_SCALAR(int8_t, Char) CONCUR_SCALAR(int16_t, Short) CONCUR_SCALAR(int, Int) CONCUR_SCALAR(int64_t, Long)
CONCUR_SCALAR(float, Float) CONCUR_SCALAR(double, Double) CONCUR_SCALAR(bool, Bool)
CONCUR_SCALAR(uint16_t, UInt16) CONCUR_SCALAR(uint32_t, UInt32) CONCUR_SCALAR(uint64_t, UInt64)
}  // namespace concur

namespace caffe2 {
class TypeMeta final {
 public:
#ifdef CONCUR_STRING
  std::string_view name() const noexcept { return concur::type_name(index_); }
#endif
  uint16_t concur_index() const noexcept { return index_; }
  size_t itemsize() const noexcept { return concur::type_size(index_); }
  c10::ScalarType toScalarType() const {
    if (C10_UNLIKELY(index_ >= concur::scalar_types)) concur::no_scalar_type(index_);
    return static_cast<c10::ScalarType>(index_);
  }
  static TypeMeta fromScalarType(c10::ScalarType type) { TypeMeta meta(Raw{}); meta.index_ = static_cast<uint16_t>(type); return meta; }
  template <class T> static TypeMeta Make() { return fromScalarType(concur::scalar_of<T>::value); }
  friend bool operator==(const TypeMeta lhs, const TypeMeta rhs) noexcept { return lhs.index_ == rhs.index_; }

 private:
  struct Raw {};
  explicit TypeMeta(Raw) noexcept {}
  uint16_t index_;
};
inline bool operator!=(const TypeMeta lhs, const TypeMeta rhs) noexcept { return !(lhs == rhs); }
}  // namespace caffe2

namespace c10 {
inline caffe2::TypeMeta scalarTypeToTypeMeta(ScalarType type) { return caffe2::TypeMeta::fromScalarType(type); }
inline ScalarType typeMetaToScalarType(caffe2::TypeMeta meta) { return meta.toScalarType(); }
std::optional<ScalarType> optTypeMetaToScalarType(std::optional<caffe2::TypeMeta> meta);
inline bool operator==(ScalarType t, caffe2::TypeMeta m) { return m == scalarTypeToTypeMeta(t); }
inline bool operator==(caffe2::TypeMeta m, ScalarType t) { return t == m; }
inline bool operator!=(ScalarType t, caffe2::TypeMeta m) { return !(t == m); }
inline bool operator!=(caffe2::TypeMeta m, ScalarType t) { return !(t == m); }
inline const char* toString(ScalarType type) { return concur::scalar_name(type); }

// -- ArrayRef -----------------------------------------------------------------------------------------------------------------------
template <class T> class ArrayRef {
 public:
  using iterator = const T*;
  using const_iterator = const T*;
  using size_type = size_t;
  using value_type = T;
  constexpr ArrayRef() : Data(nullptr), Length(0) {}
  constexpr ArrayRef(const T& one) : Data(&one), Length(1) {}
  constexpr ArrayRef(const T* data, size_t length) : Data(data), Length(length) {}
  constexpr ArrayRef(const T* begin, const T* end) : Data(begin), Length(end - begin) {}
  template <class Container, class U = decltype(std::declval<Container>().data()),
            class = std::enable_if_t<std::is_same_v<U, T*> || std::is_same_v<U, T const*>>>
  ArrayRef(const Container& container) : Data(container.data()), Length(container.size()) {}
  template <class A> ArrayRef(const std::vector<T, A>& items) : Data(items.data()), Length(items.size()) {
    static_assert(!std::is_same_v<T, bool>, "a vector of bool has no array");
  }
#ifdef CONCUR_STD_ARRAY
  template <size_t N> constexpr ArrayRef(const std::array<T, N>& items) : Data(items.data()), Length(N) {}
#endif
  template <size_t N> constexpr ArrayRef(const T (&items)[N]) : Data(items), Length(N) {}
  constexpr ArrayRef(const std::initializer_list<T>& items) : Data(items.size() ? items.begin() : nullptr), Length(items.size()) {}

  constexpr iterator begin() const { return Data; }
  constexpr iterator end() const { return Data + Length; }
  constexpr const_iterator cbegin() const { return Data; }
  constexpr const_iterator cend() const { return Data + Length; }
  constexpr bool empty() const { return Length == 0; }
  constexpr const T* data() const { return Data; }
  constexpr size_t size() const { return Length; }
  constexpr const T& front() const { TORCH_CHECK(!empty(), "ArrayRef: attempted to access front() of empty list"); return Data[0]; }
  constexpr const T& back() const { TORCH_CHECK(!empty(), "ArrayRef: attempted to access back() of empty list"); return Data[Length - 1]; }
  constexpr bool equals(ArrayRef other) const {
    if (Length != other.Length) return false;
    for (size_t i = 0; i < Length; ++i) { if (!(Data[i] == other.Data[i])) return false; }
    return true;
  }
  constexpr ArrayRef<T> slice(size_t n, size_t m) const { TORCH_CHECK(n + m <= size(), "ArrayRef: invalid slice"); return ArrayRef<T>(data() + n, m); }
  constexpr ArrayRef<T> slice(size_t n) const { TORCH_CHECK(n <= size(), "ArrayRef: invalid slice"); return slice(n, size() - n); }
  constexpr const T& operator[](size_t index) const { return Data[index]; }
  constexpr const T& at(size_t index) const { TORCH_CHECK(index < Length, "ArrayRef: invalid index Index = ", index, "; Length = ", Length); return Data[index]; }
  template <class U> std::enable_if_t<std::is_same_v<U, T>, ArrayRef<T>>& operator=(U&&) = delete;
  template <class U> std::enable_if_t<std::is_same_v<U, T>, ArrayRef<T>>& operator=(std::initializer_list<U>) = delete;
  std::vector<T, std::allocator<T>> vec() const { return std::vector<T, std::allocator<T>>(Data, Data + Length); }
  friend bool operator==(ArrayRef a, ArrayRef b) { return a.equals(b); }
  friend bool operator!=(ArrayRef a, ArrayRef b) { return !a.equals(b); }

 private:
  const T* Data;
  size_t Length;
};
using IntArrayRef = ArrayRef<int64_t>;

template <class T> class OptionalArrayRef final {
 public:
  constexpr OptionalArrayRef() noexcept = default;
  constexpr OptionalArrayRef(std::nullopt_t) noexcept {}
  OptionalArrayRef(const OptionalArrayRef&) = default;
  OptionalArrayRef(OptionalArrayRef&&) noexcept = default;
  constexpr OptionalArrayRef(const std::optional<ArrayRef<T>>& other) noexcept : wrapped(other) {}
  constexpr OptionalArrayRef(std::optional<ArrayRef<T>>&& other) noexcept : wrapped(std::move(other)) {}
  constexpr OptionalArrayRef(const T& value) noexcept : wrapped(value) {}
  template <class U = ArrayRef<T>, std::enable_if_t<!std::is_same_v<std::decay_t<U>, OptionalArrayRef> && !std::is_same_v<std::decay_t<U>, std::in_place_t> &&
                                                        std::is_constructible_v<ArrayRef<T>, U&&> && std::is_convertible_v<U&&, ArrayRef<T>> &&
                                                        !std::is_convertible_v<U&&, T>, bool> = false>
  constexpr OptionalArrayRef(U&& value) noexcept(std::is_nothrow_constructible_v<ArrayRef<T>, U&&>) : wrapped(std::forward<U>(value)) {}
  constexpr OptionalArrayRef(const std::initializer_list<T>& items) noexcept : wrapped(ArrayRef<T>(items)) {}
  constexpr bool has_value() const noexcept { return wrapped.has_value(); }

 private:
  std::optional<ArrayRef<T>> wrapped;
};
using OptionalIntArrayRef = OptionalArrayRef<int64_t>;

}  // namespace c10
namespace concur { int64_t sym_int(int64_t d); }  // d, or torch's error where it is out of a SymInt's range
namespace c10 {
// A size that is a plain number; torch's may also be a symbol, which no candidate's native code ever sees.
class SymInt {
 public:
  SymInt(int64_t d) : data_(concur::sym_int(d)) {}
  SymInt() : data_(0) {}
  SymInt(const SymInt& s) : data_(s.data_) {}
  SymInt(SymInt&& s) noexcept : data_(s.data_) { s.data_ = 0; }
  SymInt& operator=(const SymInt&) = delete;
  ~SymInt() {}

 private:
  int64_t data_;
};
using SymIntArrayRef = ArrayRef<SymInt>;
using OptionalSymIntArrayRef = OptionalArrayRef<SymInt>;
SymIntArrayRef concur_sym_sizes(IntArrayRef sizes);  // throws as torch's does where a size is out of range
inline SymIntArrayRef fromIntArrayRefSlow(IntArrayRef sizes) { return concur_sym_sizes(sizes); }
}  // namespace c10

#ifdef CONCUR_HALF
#include <limits>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
namespace concur {
CONCUR_SCALAR(c10::Half, Half) CONCUR_SCALAR(c10::BFloat16, BFloat16)
}
#endif

namespace concur {
void scalar_copy(void* to, const void* from) noexcept;  // `to` is storage
void scalar_destroy(void* scalar) noexcept;
double scalar_real(const void* scalar, int which);   // 0: as float, 1: as double; throws where torch's does
int64_t scalar_whole(const void* scalar, int which);  // 0: as int, 1: as int64_t, 2: as bool
}  // namespace concur

namespace c10 {
class Scalar {
 public:
  Scalar() : Scalar(int64_t(0)) {}
  Scalar(uint8_t v) { whole(v); }
  Scalar(int8_t v) { whole(v); }
  Scalar(int16_t v) { whole(v); }
  Scalar(int v) { whole(v); }
  Scalar(int64_t v) { whole(v); }
  Scalar(long long v) { whole(v); }
  Scalar(uint16_t v) { whole(v); }
  Scalar(uint32_t v) { whole(v); }
  Scalar(uint64_t v) { if (v > static_cast<uint64_t>(INT64_MAX)) { tag = 2; value.u = v; } else { whole(static_cast<int64_t>(v)); } }
  Scalar(float v) { real(v); }
  Scalar(double v) { real(v); }
#ifdef CONCUR_HALF
  Scalar(Half v) { real(static_cast<float>(v)); }
  Scalar(BFloat16 v) { real(static_cast<float>(v)); }
#endif
  template <class T, std::enable_if_t<std::is_same_v<T, bool>, bool>* = nullptr> Scalar(T v) : tag(4) { value.i = v; }
  Scalar(const Scalar& other) { concur::scalar_copy(this, &other); }
  Scalar(Scalar&& other) noexcept { concur::scalar_copy(this, &other); }
  Scalar& operator=(const Scalar& other) { if (this != &other) { this->~Scalar(); concur::scalar_copy(this, &other); } return *this; }
  Scalar& operator=(Scalar&& other) noexcept { return *this = static_cast<const Scalar&>(other); }
  ~Scalar() { if (tag > 4) concur::scalar_destroy(this); }
  float toFloat() const { return static_cast<float>(convert(0)); }
  double toDouble() const { return convert(1); }
  int toInt() const { return static_cast<int>(convert_whole(0)); }
  int64_t toLong() const { return convert_whole(1); }
  bool toBool() const { return convert_whole(2) != 0; }
  template <class T> T to() const = delete;
  bool isFloatingPoint() const { return tag == 0 || tag == 5; }
  bool isIntegral(bool includeBool) const { return tag == 1 || tag == 2 || tag == 6 || (includeBool && isBoolean()); }
  bool isComplex() const { return tag == 3; }
  bool isBoolean() const { return tag == 4 || tag == 7; }

 private:
  void whole(int64_t v) { tag = 1; value.i = v; }
  void real(double v) { tag = 0; value.d = v; }
  double convert(int which) const { return concur::scalar_real(this, which); }
  int64_t convert_whole(int which) const { return concur::scalar_whole(this, which); }
  int tag;
  union alignas(16) { double d; int64_t i; uint64_t u; double z[2]; void* p; } value;
};
template <> inline float Scalar::to<float>() const { return toFloat(); }
template <> inline double Scalar::to<double>() const { return toDouble(); }
template <> inline int Scalar::to<int>() const { return toInt(); }
template <> inline int64_t Scalar::to<int64_t>() const { return toLong(); }
template <> inline bool Scalar::to<bool>() const { return toBool(); }

// -- TensorOptions: what makes or takes apart a std::optional is compiled once, in support/concur_common.cpp ----------------------------
struct TensorOptions {
  TensorOptions()
      : requires_grad_(false), pinned_memory_(false), has_device_(false), has_dtype_(false), has_layout_(false), has_requires_grad_(false),
        has_pinned_memory_(false), has_memory_format_(false) {}
  explicit TensorOptions(Layout layout) : TensorOptions() { layout_ = layout; has_layout_ = true; }
  template <class T, class = std::enable_if_t<std::is_same_v<std::decay_t<T>, Device>>>
  TensorOptions(T&& device) : TensorOptions() { device_ = std::forward<T>(device); has_device_ = true; }
  template <class... Args, class = std::enable_if_t<std::is_constructible_v<Device, Args&&...>>>
  TensorOptions(Args&&... args) : TensorOptions(Device(std::forward<Args>(args)...)) {}
  TensorOptions(caffe2::TypeMeta dtype) : TensorOptions() { dtype_ = dtype; has_dtype_ = true; }
  TensorOptions(ScalarType dtype) : TensorOptions(scalarTypeToTypeMeta(dtype)) {}
  TensorOptions(MemoryFormat format) : TensorOptions() { memory_format_ = format; has_memory_format_ = true; }

  TensorOptions device(std::optional<Device> device) const noexcept;
  template <class... Args> TensorOptions device(Args&&... args) const noexcept {
    return device(std::optional<Device>(std::in_place, std::forward<Args>(args)...));
  }
  TensorOptions device_index(DeviceIndex index) const noexcept;
  TensorOptions dtype(std::optional<caffe2::TypeMeta> dtype) const noexcept;
  TensorOptions dtype(std::optional<ScalarType> dtype) const noexcept;
  template <class T> TensorOptions& dtype() { dtype_ = caffe2::TypeMeta::Make<T>(); has_dtype_ = true; return *this; }
  TensorOptions layout(std::optional<Layout> layout) const noexcept;
  TensorOptions requires_grad(std::optional<bool> flag) const noexcept;
  TensorOptions pinned_memory(std::optional<bool> flag) const noexcept;
  TensorOptions memory_format(std::optional<MemoryFormat> format) const noexcept;
  Device device() const noexcept;
  bool has_device() const noexcept { return has_device_; }
  std::optional<Device> device_opt() const noexcept;
  DeviceIndex device_index() const noexcept { return device().index(); }
  caffe2::TypeMeta dtype() const noexcept;
  bool has_dtype() const noexcept { return has_dtype_; }
  std::optional<caffe2::TypeMeta> dtype_opt() const noexcept;
  Layout layout() const noexcept { return has_layout_ ? layout_ : kStrided; }
  bool has_layout() const noexcept { return has_layout_; }
  std::optional<Layout> layout_opt() const noexcept;
  bool requires_grad() const noexcept { return has_requires_grad_ ? requires_grad_ : false; }
  bool has_requires_grad() const noexcept { return has_requires_grad_; }
  bool pinned_memory() const noexcept { return has_pinned_memory_ ? pinned_memory_ : false; }
  bool has_pinned_memory() const noexcept { return has_pinned_memory_; }
  std::optional<bool> pinned_memory_opt() const noexcept;
  bool has_memory_format() const noexcept { return has_memory_format_; }
  std::optional<MemoryFormat> memory_format_opt() const noexcept;
  std::optional<bool> requires_grad_opt() const noexcept;

 private:
  friend TensorOptions requires_grad(bool flag);

  Device device_ = DeviceType::CPU;
  caffe2::TypeMeta dtype_ = caffe2::TypeMeta::Make<float>();
  Layout layout_ = Layout::Strided;
  MemoryFormat memory_format_ = MemoryFormat::Contiguous;
  bool requires_grad_ : 1;
  bool pinned_memory_ : 1;
  bool has_device_ : 1;
  bool has_dtype_ : 1;
  bool has_layout_ : 1;
  bool has_requires_grad_ : 1;
  bool has_pinned_memory_ : 1;
  bool has_memory_format_ : 1;
};

inline TensorOptions dtype(caffe2::TypeMeta dtype) { return TensorOptions(dtype); }
inline TensorOptions dtype(ScalarType dtype) { return TensorOptions(dtype); }
inline TensorOptions layout(Layout layout) { return TensorOptions(layout); }
inline TensorOptions device(Device device) { return TensorOptions(device); }
inline TensorOptions device_index(DeviceIndex index) { return TensorOptions(Device(DeviceType::CUDA, index)); }
inline TensorOptions requires_grad(bool flag = true) {
  TensorOptions r;
  r.requires_grad_ = flag;
  r.has_requires_grad_ = true;
  return r;
}
inline TensorOptions memory_format(MemoryFormat format) { return TensorOptions(format); }
template <class T> inline TensorOptions dtype() { return dtype(caffe2::TypeMeta::Make<T>()); }

namespace impl {
std::optional<MemoryFormat> check_tensor_options_and_extract_memory_format(const TensorOptions& o, std::optional<MemoryFormat> f);
}  // namespace impl
}  // namespace c10

namespace concur {
inline Piece piece(c10::ScalarType type) { return piece(scalar_name(type)); }
inline Piece piece(caffe2::TypeMeta meta) { Piece p; p.kind = 6; p.u = meta.concur_index(); return p; }
inline Piece piece(const c10::Device& device) { Piece p; p.kind = 7; p.p = &device; return p; }
inline Piece piece(const c10::IntArrayRef& items) { Piece p; p.kind = 8; p.p = items.data(); p.n = items.size(); return p; }
template <class... A> [[noreturn]] void fail(const char* func, const char* file, uint32_t line, const char* otherwise, const A&... parts) {
  const Piece pieces[] = {piece(parts)..., piece("")};
  check_failed(func, file, line, otherwise, pieces, sizeof...(A));
}
}  // namespace concur

#include <concur/tensor.h>
#include <concur/dispatch.h>
