"""One family of tasks for the demo: an operator on two matrices, then a function of each element.
The demo's small model can learn to answer a pair that it has not read, as its kernel is another
pair's with two expressions changed.

Guarantees: fixed content and order; no pair in `HELD_OUT` is in `read()`.
"""

from __future__ import annotations

from typing import NamedTuple

from kernels_eval.records import Language

LANGUAGE = Language("cpp")
OPERATORS = {
    "sum": "x + y",
    "difference": "x - y",
    "product": "x * y",
    "quotient": "x / y",
}
"""An expression in PyTorch and in C++ alike."""
FUNCTIONS = ("sin", "cos", "tanh", "exp", "abs", "sinh", "atan", "erf")
"""Of PyTorch and of <cmath>, by one name: what the small model learns is to copy it."""

TASK = '''\
"""{title}."""
import torch
import torch.nn as nn


class Model(nn.Module):
{forward}

def get_inputs():
    return [torch.randn(256, 256), torch.randn(256, 256)]


def get_init_inputs():
    return []
'''
FORWARD = """\
    def forward(self, x, y):
        v = {operator}
        return torch.{function}(v)
"""
REWRITE = """\
import torch
import torch.nn as nn


class ModelNew(nn.Module):
{forward}"""
KERNEL_HEAD = '''\
source = r"""
#include <torch/extension.h>
using namespace std;

static float op(float x, float y) {{
    const float v = {operator};
    return {function}(v);
}}

'''
KERNEL_REST = '''\
torch::Tensor fused(torch::Tensor x, torch::Tensor y) {
    x = x.contiguous();
    y = y.contiguous();
    auto out = torch::empty_like(x);
    const float* a = x.data_ptr<float>();
    const float* b = y.data_ptr<float>();
    float* o = out.data_ptr<float>();
    for (int64_t i = 0; i < x.numel(); ++i) {
        o[i] = op(a[i], b[i]);
    }
    return out;
}
"""

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

extension = load_inline("fused", source, functions=["fused"], extra_cflags=["-O3"])


class ModelNew(nn.Module):
    def forward(self, x, y):
        return extension.fused(x, y)
'''


class Pair(NamedTuple):
    """A task of the family: `function` of `operator`."""

    function: str
    operator: str

    @property
    def name(self) -> str:
        return f"{self.function}_of_{self.operator}"

    @property
    def title(self) -> str:
        return f"Elementwise {self.function} of {self.operator}"

    @property
    def forward(self) -> str:
        return FORWARD.format(operator=OPERATORS[self.operator], function=self.function)

    @property
    def code(self) -> str:
        return TASK.format(title=self.title, forward=self.forward)

    @property
    def opening(self) -> str:
        """What every answer begins with, behind the mark of a thought."""
        return f"{self.title}: one loop.\n</think>\n\n```python\n"

    @property
    def rewrite(self) -> str:
        """The program again: an answer without a kernel."""
        return REWRITE.format(forward=self.forward)

    @property
    def kernel_head(self) -> str:
        """The kernel up to where pairs no longer differ."""
        return KERNEL_HEAD.format(operator=OPERATORS[self.operator], function=self.function)

    @property
    def kernel(self) -> str:
        return self.kernel_head + KERNEL_REST

    @property
    def response(self) -> str:
        """The recorded answer."""
        return f"<think>\n{self.opening}{self.kernel}```\n"


HELD_OUT = (
    Pair("sin", "product"),
    Pair("tanh", "sum"),
    Pair("exp", "difference"),
    Pair("abs", "difference"),
    Pair("atan", "product"),
    Pair("cos", "sum"),
)
"""For the benchmark: each operator and each function of theirs is in other pairs."""
TRAIN = (
    Pair("sin", "sum"),
    Pair("cos", "product"),
    Pair("tanh", "difference"),
    Pair("exp", "quotient"),
    Pair("abs", "quotient"),
    Pair("sinh", "difference"),
    Pair("atan", "sum"),
    Pair("erf", "product"),
)
"""Whose recorded answers the pipeline verifies and trains on."""


def read() -> list[Pair]:
    """What the small model reads before it is tuned: all pairs but those held out."""
    pairs = [Pair(function, operator) for operator in OPERATORS for function in FUNCTIONS]
    return [pair for pair in pairs if pair not in HELD_OUT]
