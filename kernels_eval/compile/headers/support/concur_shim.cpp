// What headers/lite leaves out of line, compiled once per (torch, Python, compiler) with torch's real headers. First it asserts that every
// layout the lite headers repeat is torch's own: a torch that changes one fails here, as a fault of the toolchain, not of a candidate.
// Operators are called as methods: torch's headers of operators and of autograd, which these names would need, cost as much again.
#include <cstring>
#include <ATen/core/Tensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like_ops.h>

static_assert(sizeof(at::Tensor) == 8 && sizeof(c10::intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>) == 8);
static_assert(sizeof(c10::Scalar) == 32 && alignof(c10::Scalar) == 16);
static_assert(sizeof(c10::TensorOptions) == 8 && std::is_trivially_copyable_v<c10::TensorOptions>);
static_assert(sizeof(c10::Device) == 2 && std::is_trivially_copyable_v<c10::Device> && sizeof(caffe2::TypeMeta) == 2);
static_assert(sizeof(c10::IntArrayRef) == 16 && std::is_trivially_copyable_v<c10::IntArrayRef>);
static_assert(sizeof(c10::OptionalIntArrayRef) == 24 && sizeof(c10::SymInt) == 8 && !std::is_trivially_copyable_v<c10::SymInt>);
static_assert(std::is_trivially_copyable_v<c10::OptionalIntArrayRef> && sizeof(c10::Stream) == 16);
static_assert(sizeof(at::DeprecatedTypeProperties) == 8 && sizeof(at::AutoDispatchBelowADInplaceOrView) <= 32);
#define SAME_TYPE(name, number) static_assert(static_cast<int>(c10::ScalarType::name) == number)
SAME_TYPE(Byte, 0); SAME_TYPE(Char, 1); SAME_TYPE(Short, 2); SAME_TYPE(Int, 3); SAME_TYPE(Long, 4); SAME_TYPE(Half, 5);
SAME_TYPE(Float, 6); SAME_TYPE(Double, 7); SAME_TYPE(ComplexFloat, 9); SAME_TYPE(ComplexDouble, 10); SAME_TYPE(Bool, 11);
SAME_TYPE(BFloat16, 15); SAME_TYPE(Float8_e5m2, 23); SAME_TYPE(Float8_e4m3fn, 24); SAME_TYPE(UInt16, 27); SAME_TYPE(UInt32, 28);
SAME_TYPE(UInt64, 29);
static_assert(static_cast<int>(c10::DeviceType::Meta) == 14 && static_cast<int>(c10::DeviceType::PrivateUse1) == 20);
static_assert(static_cast<int>(c10::Layout::Jagged) == 7 && static_cast<int>(c10::MemoryFormat::ChannelsLast3d) == 3);

namespace c10 {
SymIntArrayRef concur_sym_sizes(IntArrayRef sizes) { return fromIntArrayRefSlow(sizes); }
// emitted here, since it is taken the address of
auto* const concur_emitted __attribute__((used)) = &impl::check_tensor_options_and_extract_memory_format;
}  // namespace c10

namespace concur {
namespace {
c10::TensorImpl* impl_of(const void* impl) { return static_cast<c10::TensorImpl*>(const_cast<void*>(impl)); }
at::Tensor& tensor(const void* x) { return *static_cast<at::Tensor*>(const_cast<void*>(x)); }
const c10::Scalar& scalar(const void* x) { return *static_cast<const c10::Scalar*>(x); }
void give(void* out, at::Tensor&& value) { new (out) at::Tensor(std::move(value)); }
}  // namespace

// -- types ----------------------------------------------------------------------------------------------------------------------------
const char* scalar_name(c10::ScalarType type) { return c10::toString(type); }
namespace {
caffe2::TypeMeta meta_of(uint16_t index) {
  caffe2::TypeMeta meta;
  std::memcpy(&meta, &index, sizeof index);
  return meta;
}
}  // namespace
std::string_view type_name(uint16_t index) { auto name = meta_of(index).name(); return {name.data(), name.size()}; }
size_t type_size(uint16_t index) { return meta_of(index).itemsize(); }
extern const uint16_t scalar_types = c10::NumScalarTypes;
[[noreturn]] void no_scalar_type(uint16_t index) {
  (void)c10::typeMetaToScalarType(meta_of(index));  // throws
  __builtin_unreachable();
}
struct Piece {
  int kind;
  union { const char* s; int64_t i; uint64_t u; double d; const void* p; };
  size_t n;
};
void check_failed(const char* func, const char* file, uint32_t line, const char* otherwise, const Piece* pieces, size_t count) {
  if (count == 0) c10::detail::torchCheckFail(func, file, line, otherwise);
  std::ostringstream all;
  for (size_t i = 0; i < count; ++i) {
    const Piece& p = pieces[i];
    switch (p.kind) {
      case 0: all << p.s; break;
      case 1: all << static_cast<char>(p.i); break;
      case 2: all << p.d; break;
      case 3: all << p.u; break;
      case 4: all << p.i; break;
      case 5: all.write(p.s, static_cast<std::streamsize>(p.n)); break;
      case 6: all << meta_of(static_cast<uint16_t>(p.u)).name(); break;
      case 7: all << *static_cast<const c10::Device*>(p.p); break;
      default: all << c10::IntArrayRef(static_cast<const int64_t*>(p.p), p.n);
    }
  }
  c10::detail::torchCheckFail(func, file, line, all.str());
}
void not_implemented(const char* name, c10::ScalarType type, const char* function, const char* file, uint32_t line) {
  throw c10::NotImplementedError({function, file, line}, c10::str('"', name, "\" not implemented for '", c10::toString(type), "'"));
}

void scalar_copy(void* to, const void* from) noexcept { new (to) c10::Scalar(scalar(from)); }
void scalar_destroy(void* x) noexcept { static_cast<c10::Scalar*>(x)->~Scalar(); }
double scalar_real(const void* x, int which) { return which ? scalar(x).toDouble() : scalar(x).toFloat(); }
int64_t scalar_whole(const void* x, int which) {
  return which == 0 ? scalar(x).toInt() : which == 1 ? scalar(x).toLong() : scalar(x).toBool();
}
int64_t sym_int(int64_t d) {
  TORCH_CHECK(c10::SymInt::check_range(d), "a size of ", d, " is out of range");
  return d;
}

// -- a tensor's metadata --------------------------------------------------------------------------------------------------------------
extern void* const undefined = c10::UndefinedTensorImpl::singleton();
void retain(void* impl) noexcept {
  if (impl != undefined) c10::raw::intrusive_ptr::incref(impl_of(impl));
}
void release(void* impl) noexcept {
  if (impl != undefined) c10::raw::intrusive_ptr::decref(impl_of(impl));
}
struct Fields : c10::TensorImpl {  // of its base, which may be named from here alone
  template <class M> static int64_t place(M member) {
    static_assert(sizeof(member) == sizeof(int64_t), "a pointer to a member is its place, in bytes");
    int64_t at;
    std::memcpy(&at, &member, sizeof at);
    return at;
  }
  static int64_t numel_place() { return place(&Fields::numel_); }
  static int64_t sizes_place() { return place(&Fields::sizes_and_strides_); }
  static int64_t offset_place() { return place(&Fields::storage_offset_); }
  static int64_t dtype_place() { return place(&Fields::data_type_); }
  static int64_t device_place() { return place(&Fields::device_opt_); }
  static_assert(sizeof(device_opt_) == sizeof(c10::Device) + 1, "tensor.h reads a device, then whether there is one");
};
static_assert(sizeof(c10::impl::SizesAndStrides) == 8 * (1 + 2 * 5), "tensor.h reads the number of dimensions, then sizes, then strides");
extern const int64_t numel_at = Fields::numel_place(), sizes_at = Fields::sizes_place(), offset_at = Fields::offset_place();
extern const int64_t dtype_at = Fields::dtype_place(), device_at = Fields::device_place();
int64_t size(const void* impl, int64_t dim) { return impl_of(impl)->size(dim); }
int64_t stride(const void* impl, int64_t dim) {
  auto strides = impl_of(impl)->strides();
  return strides[c10::maybe_wrap_dim(dim, static_cast<int64_t>(strides.size()), false)];
}
size_t itemsize(const void* impl) { return impl_of(impl)->itemsize(); }
size_t use_count(const void* impl) { return impl == undefined ? 0 : c10::raw::intrusive_ptr::use_count(impl_of(impl)); }
bool is_contiguous(const void* impl, c10::MemoryFormat format) { return impl_of(impl)->is_contiguous(format); }
bool is_kind(const void* impl, int kind) {
  auto* x = impl_of(impl);
  switch (kind) {
    case 0: return x->is_sparse();
    case 1: return c10::isComplexType(c10::typeMetaToScalarType(x->dtype()));
    case 2: return c10::isFloatingType(c10::typeMetaToScalarType(x->dtype()));
    case 3: return c10::isSignedType(c10::typeMetaToScalarType(x->dtype()));
    case 4: return x->requires_grad();
    default: return x->is_quantized();
  }
}
c10::Device device(const void* impl) { return impl_of(impl)->device(); }
c10::Layout layout(const void* impl) { return impl_of(impl)->layout(); }
c10::TensorOptions options(const void* impl) {
  auto* x = impl_of(impl);
  return c10::TensorOptions().dtype(x->dtype()).device(x->device()).layout(x->layout());
}
void* data(const void* impl, bool mutates) {
  return mutates ? impl_of(impl)->mutable_data() : const_cast<void*>(impl_of(impl)->data());
}
// Not torch's own functions: what a loop over them spends is time in a candidate's code, not in a library's.
void* data(const void* impl, bool mutates, c10::ScalarType type) {
  auto found = c10::typeMetaToScalarType(impl_of(impl)->dtype());
  TORCH_CHECK(c10::toUnderlying(found) == type, "expected scalar type ", type, " but found ", found);
  return data(impl, mutates);
}

// -- operators that need no name ------------------------------------------------------------------------------------------------------
void contiguous(void* out, const void* x, c10::MemoryFormat format) { give(out, tensor(x).contiguous(format)); }
void select(void* out, const void* x, int64_t index) { give(out, tensor(x)[index]); }
void negated(void* out, const void* x, bool bitwise) { give(out, bitwise ? tensor(x).bitwise_not() : tensor(x).neg()); }
void moved(void* out, const void* x, c10::DeviceType type) {
  give(out, tensor(x).to(tensor(x).options().device(type), /*non_blocking=*/false, /*copy=*/false));
}
void cast(void* out, const void* x, c10::ScalarType type) { give(out, tensor(x).toType(type)); }
void assign(void* x, const void* y, bool y_is_tensor) {
  if (y_is_tensor) tensor(x).copy_(tensor(y));
  else tensor(x).fill_(scalar(y));
}
void index_by(void* out, const void* x, const void* y, bool y_is_tensor) {
  give(out, y_is_tensor ? tensor(x)[tensor(y)] : tensor(x)[scalar(y)]);
}
template <class Y> at::Tensor binary_of(int operation, const at::Tensor& x, const Y& y) {
  switch (operation) {
    case 0: return x.add(y);
    case 1: return x.sub(y);
    case 2: return x.mul(y);
    case 3: return x.div(y);
    case 4: return x.lt(y);
    case 5: return x.le(y);
    case 6: return x.gt(y);
    case 7: return x.ge(y);
    case 8: return x.eq(y);
    default: return x.ne(y);
  }
}
// A scalar on the left, as ATen/TensorOperators.h turns it around.
at::Tensor reversed(int operation, const c10::Scalar& x, const at::Tensor& y) {
  static constexpr int turned[] = {0, -1, 2, -1, 6, 7, 4, 5, 8, 9};
  if (turned[operation] >= 0) return binary_of(turned[operation], y, x);
  at::Tensor filled = at::_ops::empty_like::call(y, {}, {}, {}, {}, at::MemoryFormat::Preserve).fill_(x);
  return operation == 1 ? filled.sub_(y) : filled.div_(y);
}
void binary(void* out, int operation, const void* x, bool x_is_tensor, const void* y, bool y_is_tensor) {
  if (!x_is_tensor) give(out, reversed(operation, scalar(x), tensor(y)));
  else if (y_is_tensor) give(out, binary_of(operation, tensor(x), tensor(y)));
  else give(out, binary_of(operation, tensor(x), scalar(y)));
}
template <class Y> void in_place_of(int operation, at::Tensor& x, const Y& y) {
  switch (operation) {
    case 0: x += y; break;
    case 1: x -= y; break;
    case 2: x *= y; break;
    default: x /= y;
  }
}
void in_place(void* x, int operation, const void* y, bool y_is_tensor) {
  if (y_is_tensor) in_place_of(operation, tensor(x), tensor(y));
  else in_place_of(operation, tensor(x), scalar(y));
}

// -- what torch's own factories do around at::empty -----------------------------------------------------------------------------------
void enter_below_autograd(void* state) { new (state) at::AutoDispatchBelowADInplaceOrView(); }
void leave_below_autograd(void* state) {
  using Guard = at::AutoDispatchBelowADInplaceOrView;
  static_cast<Guard*>(state)->~Guard();
}
// torch::autograd::make_variable, for a tensor that has no Python object yet.
void make_variable(void* x, bool requires_grad) {
  at::Tensor& data = tensor(x);
  if (!data.defined()) return;
  const bool owned = data.use_count() == 1 && data.getIntrusivePtr()->unique_version();
  auto impl = data.getIntrusivePtr();
  if (!owned) impl = impl->shallow_copy_and_detach(/*version_counter=*/0, /*allow_tensor_metadata_change=*/true);
  impl->set_allow_tensor_metadata_change(true);
  impl->set_autograd_meta(nullptr);
  if (requires_grad) impl->set_requires_grad(true);
  data = at::Tensor(std::move(impl));
}

struct TypeProperties;
TypeProperties* properties(const void* impl) {
  at::Tensor x(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl_of(impl)));
  return reinterpret_cast<TypeProperties*>(&x.type());
}
bool properties_are_cuda(const TypeProperties* p) { return reinterpret_cast<const at::DeprecatedTypeProperties*>(p)->is_cuda(); }
c10::TensorOptions properties_options(const TypeProperties* p) { return reinterpret_cast<const at::DeprecatedTypeProperties*>(p)->options(); }

void parallel_for(int64_t begin, int64_t end, int64_t grain_size, void (*chunk)(const void*, int64_t, int64_t), const void* f) {
  at::parallel_for(begin, end, grain_size, [&](int64_t from, int64_t to) { chunk(f, from, to); });
}
}  // namespace concur
