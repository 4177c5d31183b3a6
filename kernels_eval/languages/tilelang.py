"""TileLang kernels, compiled by TileLang with the CUDA toolkit when they are first asked for."""

from __future__ import annotations

import re
from functools import partial

from kernels_eval.languages import Language, Tracer

EXAMPLE = """\
import tilelang
import tilelang.language as T
import torch
import torch.nn as nn


@tilelang.jit(out_idx=[-1])
def bias_relu_add_kernel(rows, features, block=256, dtype="float32"):
    @T.prim_func
    def main(
        x: T.Tensor((rows, features), dtype),
        bias: T.Tensor((features,), dtype),
        residual: T.Tensor((rows, features), dtype),
        out: T.Tensor((rows, features), dtype),
    ):
        with T.Kernel(T.ceildiv(features, block), rows, threads=block) as (bx, by):
            for i in T.Parallel(block):
                if bx * block + i < features:
                    column = bx * block + i
                    out[by, column] = (
                        T.max(x[by, column] + bias[column], T.float32(0)) + residual[by, column]
                    )

    return main


def bias_relu_add(x, bias, residual):
    features = x.shape[-1]
    x2, residual2 = (each.contiguous().view(-1, features) for each in (x, residual))
    kernel = bias_relu_add_kernel(x2.shape[0], features)
    return kernel(x2, bias.detach().contiguous(), residual2).view(x.shape)


class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(features))

    def forward(self, x, residual):
        return bias_relu_add(x, self.bias, residual)
"""


class TileLang(Language):
    needs_nvcc = True
    packages = {"tilelang": "tilelang"}
    extra = "tilelang"
    means = "custom TileLang kernels for an NVIDIA GPU"
    example = EXAMPLE
    sign = re.compile(r"^[ \t]*(?:import|from) tilelang\b", re.MULTILINE)
    jit_cache = "TILELANG_CACHE_DIR"
    compiler_errors = r"^tilelang\.|^tvm\.error\."
    compiler_frames = r"tilelang\.jit\.(compile|get_tir|_infer_jit_mode|parse_cache_key)$"

    def watch(self, tracer: Tracer) -> None:
        from tilelang.jit.kernel import JITKernel

        original = JITKernel.__call__

        def call(kernel: JITKernel, *args: object, **kwargs: object) -> object:
            function = getattr(kernel, "prim_func", None)
            name = str(getattr(function, "__name__", "tilelang kernel"))
            return tracer.watch(name, partial(original, kernel), args, kwargs)

        JITKernel.__call__ = call


LANGUAGE = TileLang("tilelang")
