"""NVIDIA's cuTile (cuda-tile), compiled by tileiras when a kernel is first launched."""

from __future__ import annotations

import re

from kernels_eval.languages import Language, Tracer, Values

EXAMPLE = """\
import cuda.tile as ct
import torch
import torch.nn as nn


@ct.kernel
def bias_relu_add_kernel(x, bias, residual, out, BLOCK: ct.Constant[int]):
    row, column = ct.bid(0), ct.bid(1)
    value = ct.load(x, index=(row, column), shape=(1, BLOCK))
    value = value + ct.load(bias, index=(column,), shape=(BLOCK,))
    value = ct.maximum(value, 0.0) + ct.load(residual, index=(row, column), shape=(1, BLOCK))
    ct.store(out, index=(row, column), tile=value)


def bias_relu_add(x, bias, residual):
    features, block = x.shape[-1], 1024
    x2, residual2 = (each.contiguous().view(-1, features) for each in (x, residual))
    out = torch.empty_like(x2)
    if out.numel():
        grid = (x2.shape[0], (features + block - 1) // block, 1)
        arguments = (x2, bias.detach().contiguous(), residual2, out, block)
        ct.launch(torch.cuda.current_stream(), grid, bias_relu_add_kernel, arguments)
    return out.view(x.shape)


class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(features))

    def forward(self, x, residual):
        return bias_relu_add(x, self.bias, residual)
"""


class CuTile(Language):
    packages = {"cuda-tile": "cuda.tile"}
    extra = "cutile"
    means = "custom kernels in NVIDIA's cuTile (`cuda.tile`) for an NVIDIA GPU"
    example = EXAMPLE
    sign = re.compile(
        r"^[ \t]*(?:import cuda\.tile|from cuda\.tile|from cuda import tile)\b", re.MULTILINE
    )
    jit_cache = "CUDA_TILE_CACHE_DIR"
    compiler_errors = r"^cuda\.tile\._exception\."

    def watch(self, tracer: Tracer) -> None:
        import cuda.tile

        original = cuda.tile.launch

        def launch(
            stream: object, grid: object, kernel: object, arguments: Values, /, **options: object
        ) -> None:
            function = getattr(getattr(kernel, "_annotated_function", None), "pyfunc", kernel)
            name = str(getattr(function, "__name__", "cutile kernel"))

            def run(*given: object) -> object:
                return original(stream, grid, kernel, given, **options)

            tracer.watch(name, run, tuple(arguments), {})

        cuda.tile.launch = launch


LANGUAGE = CuTile("cutile")
