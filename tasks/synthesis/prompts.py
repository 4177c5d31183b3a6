"""The prompts that ask a generator for a kernel: one template, one worked example a language.

Guarantees: the same task, language and hardware line give the same prompt, character for character,
in every release with the same `PROMPT_VERSION`; the task's code appears whole and unchanged. Holds
no task of any benchmark: the example was written for concur.
"""

from __future__ import annotations

import re

from kernels_eval.records import KernelTask, Language, stable_hash

PROMPT_VERSION = 1
"""Raised with every change of the wording or the examples."""

EXAMPLE_TASK = """\
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(features))

    def forward(self, x, residual):
        return torch.relu(x + self.bias) + residual


def get_inputs():
    return [torch.randn(512, 2048), torch.randn(512, 2048)]


def get_init_inputs():
    return [2048]
"""

EXAMPLE_CUDA = '''\
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

EXAMPLE_CPP = '''\
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

EXAMPLE_TRITON = """\
import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def bias_relu_add_kernel(x_ptr, bias_ptr, residual_ptr, out_ptr, count, features, BLOCK: \
tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    x = tl.load(x_ptr + index, mask=mask)
    bias = tl.load(bias_ptr + index % features, mask=mask)
    residual = tl.load(residual_ptr + index, mask=mask)
    tl.store(out_ptr + index, tl.maximum(x + bias, 0.0) + residual, mask=mask)


def bias_relu_add(x, bias, residual):
    x, bias, residual = x.contiguous(), bias.contiguous(), residual.contiguous()
    out = torch.empty_like(x)
    count = x.numel()
    block = 1024
    if count > 0:
        bias_relu_add_kernel[(triton.cdiv(count, block),)](x, bias, residual, out, count, \
x.shape[-1], BLOCK=block)
    return out


class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(features))

    def forward(self, x, residual):
        return bias_relu_add(x, self.bias, residual)
"""

EXAMPLES = {Language.CUDA: EXAMPLE_CUDA, Language.CPP: EXAMPLE_CPP, Language.TRITON: EXAMPLE_TRITON}

MEANS = {
    Language.CUDA: (
        "custom CUDA kernels for an NVIDIA GPU, compiled with"
        " `torch.utils.cpp_extension.load_inline`"
    ),
    Language.CPP: "custom C++ for the CPU, compiled with `torch.utils.cpp_extension.load_inline`",
    Language.TRITON: "custom Triton kernels for an NVIDIA GPU",
}

TEMPLATE = """\
You write fast kernels for PyTorch programs. You are given a module named `{entry_point}`. Replace \
the operators in its `forward` by \
{means}, so that it computes the same result in less time. You may replace some operators and keep \
others, fuse several into one kernel, \
or use a better algorithm.

Here is an example. The given program:

{example_task}

A complete answer to it:

{example_answer}

Now the program to make faster:

{task}
{hardware}
Rules:
- Name the new module `ModelNew`. Its constructor and its `forward` take the same arguments as \
those of `{entry_point}`.
- Create the same parameters and buffers, in the same order and with the same shapes and initial \
values, and read them in `forward`.
- The work must be done by your kernel. Do not fall back to PyTorch operators where it fails.
- Keep the precision of the original, and do not change the inputs. The result must be right for \
any input values.
- Answer with one complete Python module in a single code block: imports, kernels and `ModelNew`. \
No tests, no example calls.
"""


def render(task: KernelTask, language: Language, hardware: str | None = None) -> str:
    """The prompt that asks for a kernel in `language` for `task`. `hardware` is one line on the
    machine it will run on."""
    return TEMPLATE.format(
        entry_point=task.entry_point,
        means=MEANS[language],
        example_task=block(EXAMPLE_TASK),
        example_answer=block(EXAMPLES[language]),
        task=block(task.code),
        hardware=(
            f"\nIt will run on: {' '.join(hardware.split())}\n"
            if hardware and hardware.strip()
            else ""
        ),
    )


def prompt_hash(prompt: str, *versions: int) -> str:
    """Identity of a prompt: hash(`PROMPT_VERSION`, further versions, prompt)."""
    return stable_hash([PROMPT_VERSION, *versions, prompt])


def block(code: str, language: str = "python") -> str:
    """`code` as a fenced block. The fence is longer than any run of backticks inside, so that
    nothing in the code can close it."""
    longest = max((len(run) for run in re.findall("`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{code.rstrip()}\n{fence}"
