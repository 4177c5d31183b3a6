"""CUDA C++ in `load_inline` or `load`, built with nvcc."""

from __future__ import annotations

import re

from kernels_eval.languages import Language

EXAMPLE = '''\
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = r"""
#include <torch/extension.h>

__global__ void bias_relu_add_kernel(
    const float* x, const float* bias, const float* residual, float* out, int64_t count, int64_t \
features) {
    const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += \
stride) {
        out[i] = fmaxf(x[i] + bias[i % features], 0.0f) + residual[i];
    }
}

torch::Tensor bias_relu_add(torch::Tensor x, torch::Tensor bias, torch::Tensor residual) {
    x = x.contiguous();
    bias = bias.contiguous();
    residual = residual.contiguous();
    auto out = torch::empty_like(x);
    const int64_t count = x.numel();
    const int threads = 256;
    const int blocks = static_cast<int>(std::min<int64_t>((count + threads - 1) / threads, 65535));
    if (count > 0) {
        bias_relu_add_kernel<<<blocks, threads>>>(
            x.data_ptr<float>(), bias.data_ptr<float>(), residual.data_ptr<float>(), \
out.data_ptr<float>(), count, x.size(-1));
    }
    return out;
}
"""

cpp_source = "torch::Tensor bias_relu_add(torch::Tensor x, torch::Tensor bias, torch::Tensor \
residual);"

extension = load_inline(
    name="bias_relu_add_cuda",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["bias_relu_add"],
)


class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(features))

    def forward(self, x, residual):
        return extension.bias_relu_add(x, self.bias, residual)
'''


class Cuda(Language):
    needs_nvcc = True
    means = (
        "custom CUDA kernels for an NVIDIA GPU, compiled with"
        " `torch.utils.cpp_extension.load_inline`"
    )
    example = EXAMPLE
    sign = re.compile(
        r"""__global__|<<<|\.cu["']|\bcuda_sources?\s*=(?!=)\s*+(?!\[?\s*+(?:""|\'\'|None)?\s*+[],)])"""
    )
    jit = False
    sanitized = True


LANGUAGE = Cuda("cuda")
