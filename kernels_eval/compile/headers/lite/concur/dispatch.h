// AT_DISPATCH_*: a switch over the dtypes a macro covers, `scalar_t` in each case, NotImplementedError for any other.
#pragma once
namespace detail {
inline c10::ScalarType scalar_type(c10::ScalarType s) { return s; }
}  // namespace detail
namespace concur {
[[noreturn]] void not_implemented(const char* name, c10::ScalarType type, const char* function, const char* file, uint32_t line);
template <c10::ScalarType type> struct cpp_type_of;
#define CONCUR_CPP(name, t) template <> struct cpp_type_of<c10::ScalarType::name> { using type = t; };
CONCUR_CPP(Byte, uint8_t) CONCUR_CPP(Char, int8_t) CONCUR_CPP(Short, int16_t) CONCUR_CPP(Int, int) CONCUR_CPP(Long, int64_t)
CONCUR_CPP(Float, float) CONCUR_CPP(Double, double) CONCUR_CPP(Bool, bool)
#ifdef CONCUR_HALF
CONCUR_CPP(Half, c10::Half) CONCUR_CPP(BFloat16, c10::BFloat16)
#endif
#undef CONCUR_CPP
}  // namespace concur
#define AT_DISPATCH_CASE(enum_type, ...) \
  case enum_type: { using scalar_t [[maybe_unused]] = typename ::concur::cpp_type_of<enum_type>::type; return __VA_ARGS__(); }
#define AT_DISPATCH_SWITCH(TYPE, NAME, ...)                                                                    \
  [&] {                                                                                                        \
    const auto& the_type = TYPE;                                                                               \
    constexpr const char* at_dispatch_name = NAME;                                                             \
    c10::ScalarType _st = ::detail::scalar_type(the_type);                                                     \
    switch (_st) {                                                                                             \
      __VA_ARGS__                                                                                              \
      default: ::concur::not_implemented(at_dispatch_name, _st, __func__, __FILE__, static_cast<uint32_t>(__LINE__)); \
    }                                                                                                          \
  }()
#define AT_DISPATCH_CASE_FLOATING_TYPES(...) AT_DISPATCH_CASE(at::ScalarType::Double, __VA_ARGS__) AT_DISPATCH_CASE(at::ScalarType::Float, __VA_ARGS__)
#define AT_DISPATCH_FLOATING_TYPES(TYPE, NAME, ...) AT_DISPATCH_SWITCH(TYPE, NAME, AT_DISPATCH_CASE_FLOATING_TYPES(__VA_ARGS__))
#define AT_DISPATCH_CASE_FLOATING_TYPES_AND_HALF(...) AT_DISPATCH_CASE_FLOATING_TYPES(__VA_ARGS__) AT_DISPATCH_CASE(at::ScalarType::Half, __VA_ARGS__)
#define AT_DISPATCH_FLOATING_TYPES_AND_HALF(TYPE, NAME, ...) AT_DISPATCH_SWITCH(TYPE, NAME, AT_DISPATCH_CASE_FLOATING_TYPES_AND_HALF(__VA_ARGS__))
#define AT_DISPATCH_CASE_FLOATING_TYPES_AND(S, ...) AT_DISPATCH_CASE_FLOATING_TYPES(__VA_ARGS__) AT_DISPATCH_CASE(S, __VA_ARGS__)
#define AT_DISPATCH_FLOATING_TYPES_AND(S, TYPE, NAME, ...) AT_DISPATCH_SWITCH(TYPE, NAME, AT_DISPATCH_CASE_FLOATING_TYPES_AND(S, __VA_ARGS__))
#define AT_DISPATCH_CASE_FLOATING_TYPES_AND2(S, S2, ...) AT_DISPATCH_CASE_FLOATING_TYPES_AND(S, __VA_ARGS__) AT_DISPATCH_CASE(S2, __VA_ARGS__)
#define AT_DISPATCH_FLOATING_TYPES_AND2(S, S2, TYPE, NAME, ...) \
  AT_DISPATCH_SWITCH(TYPE, NAME, AT_DISPATCH_CASE_FLOATING_TYPES_AND2(S, S2, __VA_ARGS__))
#define AT_DISPATCH_CASE_INTEGRAL_TYPES(...)                                                                                       \
  AT_DISPATCH_CASE(at::ScalarType::Byte, __VA_ARGS__) AT_DISPATCH_CASE(at::ScalarType::Char, __VA_ARGS__)                         \
  AT_DISPATCH_CASE(at::ScalarType::Int, __VA_ARGS__) AT_DISPATCH_CASE(at::ScalarType::Long, __VA_ARGS__)                          \
  AT_DISPATCH_CASE(at::ScalarType::Short, __VA_ARGS__)
#define AT_DISPATCH_INTEGRAL_TYPES(TYPE, NAME, ...) AT_DISPATCH_SWITCH(TYPE, NAME, AT_DISPATCH_CASE_INTEGRAL_TYPES(__VA_ARGS__))
#define AT_DISPATCH_CASE_ALL_TYPES(...) AT_DISPATCH_CASE_INTEGRAL_TYPES(__VA_ARGS__) AT_DISPATCH_CASE_FLOATING_TYPES(__VA_ARGS__)
#define AT_DISPATCH_ALL_TYPES(TYPE, NAME, ...) AT_DISPATCH_SWITCH(TYPE, NAME, AT_DISPATCH_CASE_ALL_TYPES(__VA_ARGS__))
#define AT_DISPATCH_CASE_ALL_TYPES_AND(S, ...) AT_DISPATCH_CASE_ALL_TYPES(__VA_ARGS__) AT_DISPATCH_CASE(S, __VA_ARGS__)
#define AT_DISPATCH_ALL_TYPES_AND(S, TYPE, NAME, ...) AT_DISPATCH_SWITCH(TYPE, NAME, AT_DISPATCH_CASE_ALL_TYPES_AND(S, __VA_ARGS__))
#define AT_DISPATCH_CASE_ALL_TYPES_AND2(S, S2, ...) AT_DISPATCH_CASE_ALL_TYPES_AND(S, __VA_ARGS__) AT_DISPATCH_CASE(S2, __VA_ARGS__)
#define AT_DISPATCH_ALL_TYPES_AND2(S, S2, TYPE, NAME, ...) AT_DISPATCH_SWITCH(TYPE, NAME, AT_DISPATCH_CASE_ALL_TYPES_AND2(S, S2, __VA_ARGS__))
