"""C++ on the CPU, in `load_inline` or `load`."""

from __future__ import annotations

import re

from kernels_eval.languages import Language

EXAMPLE = '''\
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cpp_source = r"""
#include <torch/extension.h>
#include <algorithm>

torch::Tensor bias_relu_add(torch::Tensor x, torch::Tensor bias, torch::Tensor residual) {
    x = x.contiguous();
    bias = bias.contiguous();
    residual = residual.contiguous();
    auto out = torch::empty_like(x);
    const int64_t features = x.size(-1);
    const int64_t rows = features ? x.numel() / features : 0;
    const float* x_data = x.data_ptr<float>();
    const float* bias_data = bias.data_ptr<float>();
    const float* residual_data = residual.data_ptr<float>();
    float* out_data = out.data_ptr<float>();
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t column = 0; column < features; ++column) {
            const int64_t i = row * features + column;
            out_data[i] = std::max(x_data[i] + bias_data[column], 0.0f) + residual_data[i];
        }
    }
    return out;
}
"""

extension = load_inline(
    name="bias_relu_add_cpp",
    cpp_sources=cpp_source,
    functions=["bias_relu_add"],
    extra_cflags=["-O3"],
)


class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(features))

    def forward(self, x, residual):
        return extension.bias_relu_add(x, self.bias, residual)
'''


class Cpp(Language):
    needs_gpu = False
    means = "custom C++ for the CPU, compiled with `torch.utils.cpp_extension.load_inline`"
    example = EXAMPLE
    sign = re.compile(r"\bload_inline\(|\bcpp_sources?\b")
    half_of_others = True
    jit = False
    instrumented = True


LANGUAGE = Cpp("cpp")
