// Accessors, over torch's header-only ones; read only where a source names them.
#pragma once
#include <limits>
#include <torch/headeronly/core/TensorAccessor.h>
namespace at {
using torch::headeronly::DefaultPtrTraits;
#if defined(__CUDACC__)
using torch::headeronly::RestrictPtrTraits;
#endif
template <typename T, size_t N, template <typename U> class PtrTraits = DefaultPtrTraits, typename index_t = int64_t>
using TensorAccessor = torch::headeronly::detail::TensorAccessor<c10::IntArrayRef, T, N, PtrTraits, index_t>;
namespace detail {
template <size_t N, typename index_t> struct IndexBoundsCheck {
  IndexBoundsCheck(index_t i) { TORCH_CHECK(0 <= i && i < index_t{N}, "Index ", i, " is not within bounds of a tensor of dimension ", N); }
};
}  // namespace detail
template <typename T, size_t N, template <typename U> class PtrTraits = DefaultPtrTraits, typename index_t = int64_t>
using GenericPackedTensorAccessor = torch::headeronly::detail::GenericPackedTensorAccessor<
    TensorAccessor<T, N - 1, PtrTraits, index_t>, detail::IndexBoundsCheck<N, index_t>, T, N, PtrTraits, index_t>;
template <typename T, size_t N, template <typename U> class PtrTraits = DefaultPtrTraits, typename index_t = int64_t>
using PackedTensorAccessor = GenericPackedTensorAccessor<T, N, PtrTraits, index_t>;
template <typename T, size_t N, template <typename U> class PtrTraits = DefaultPtrTraits>
using PackedTensorAccessor32 = GenericPackedTensorAccessor<T, N, PtrTraits, int32_t>;
template <typename T, size_t N, template <typename U> class PtrTraits = DefaultPtrTraits>
using PackedTensorAccessor64 = GenericPackedTensorAccessor<T, N, PtrTraits, int64_t>;
}  // namespace at

#define CONCUR_ACCESSORS                                                                                                              \
  template <typename T, size_t N> TensorAccessor<T, N> accessor() const& {                                                            \
    static_assert(N > 0, "accessor is for indexing");                                                                                 \
    TORCH_CHECK(dim() == N, "TensorAccessor expected ", N, " dims but tensor has ", dim());                                           \
    return TensorAccessor<T, N>(concur_pointer<T>(), sizes().data(), strides().data());                                               \
  }                                                                                                                                   \
  template <typename T, size_t N> TensorAccessor<T, N> accessor() && = delete;                                                        \
  template <typename T, size_t N, template <typename U> class PtrTraits = DefaultPtrTraits, typename index_t = int64_t>               \
  GenericPackedTensorAccessor<T, N, PtrTraits, index_t> generic_packed_accessor() const& {                                            \
    static_assert(N > 0, "accessor is for indexing");                                                                                 \
    TORCH_CHECK(dim() == N, "TensorAccessor expected ", N, " dims but tensor has ", dim());                                           \
    return GenericPackedTensorAccessor<T, N, PtrTraits, index_t>(                                                                     \
        static_cast<typename PtrTraits<T>::PtrType>(concur_pointer<T>()), sizes().data(), strides().data());                          \
  }                                                                                                                                   \
  template <typename T, size_t N, template <typename U> class PtrTraits = DefaultPtrTraits, typename index_t = int64_t>               \
  GenericPackedTensorAccessor<T, N> generic_packed_accessor() && = delete;                                                            \
  template <typename T, size_t N, template <typename U> class PtrTraits = DefaultPtrTraits>                                           \
  PackedTensorAccessor32<T, N, PtrTraits> packed_accessor32() const& {                                                                \
    TORCH_CHECK(numel() <= static_cast<int64_t>(std::numeric_limits<int32_t>::max()), "numel needs to be smaller than int32_t max");  \
    return generic_packed_accessor<T, N, PtrTraits, int32_t>();                                                                       \
  }                                                                                                                                   \
  template <typename T, size_t N, template <typename U> class PtrTraits = DefaultPtrTraits>                                           \
  PackedTensorAccessor32<T, N, PtrTraits> packed_accessor32() && = delete;                                                            \
  template <typename T, size_t N, template <typename U> class PtrTraits = DefaultPtrTraits>                                           \
  PackedTensorAccessor64<T, N, PtrTraits> packed_accessor64() const& { return generic_packed_accessor<T, N, PtrTraits, int64_t>(); }  \
  template <typename T, size_t N, template <typename U> class PtrTraits = DefaultPtrTraits>                                           \
  PackedTensorAccessor64<T, N, PtrTraits> packed_accessor64() && = delete;                                                            \
  template <typename T, size_t N, template <typename U> class PtrTraits = DefaultPtrTraits, typename index_t = int64_t>               \
  GenericPackedTensorAccessor<T, N, PtrTraits, index_t> packed_accessor() const& {                                                    \
    return generic_packed_accessor<T, N, PtrTraits, index_t>();                                                                       \
  }                                                                                                                                   \
  template <typename T, size_t N, template <typename U> class PtrTraits = DefaultPtrTraits, typename index_t = int64_t>               \
  GenericPackedTensorAccessor<T, N, PtrTraits, index_t> packed_accessor() && = delete;                                                \
  template <typename T> T* concur_pointer() const {                                                                                   \
    if constexpr (std::is_const_v<T>) return const_data_ptr<T>(); else return mutable_data_ptr<T>();                                  \
  }
