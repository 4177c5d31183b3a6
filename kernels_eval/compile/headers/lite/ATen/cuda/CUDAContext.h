// Streams and error checks of <ATen/cuda/CUDAContext.h>. Torch's own needs these libraries' headers, so without them it does not compile.
#pragma once
#if !__has_include(<cusparse.h>) || !__has_include(<cublas_v2.h>) || !__has_include(<cublasLt.h>) || !__has_include(<cusolverDn.h>)
#error "torch's CUDAContext.h needs the headers of cuSPARSE, cuBLAS and cuSOLVER"
#endif
#include <c10/cuda/CUDAStream.h>
#define AT_CUDA_CHECK(EXPR) C10_CUDA_CHECK(EXPR)
