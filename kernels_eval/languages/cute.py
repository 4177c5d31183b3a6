"""NVIDIA's CuTe DSL (nvidia-cutlass-dsl), compiled by `cute.compile` or at the first call."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import partial

from kernels_eval.languages import Language, Tracer

EXAMPLE = """\
import cutlass
import cutlass.cute as cute
import torch
import torch.nn as nn
from cutlass.cute.runtime import from_dlpack


@cute.kernel
def bias_relu_add_kernel(
    x: cute.Tensor,
    bias: cute.Tensor,
    residual: cute.Tensor,
    out: cute.Tensor,
    count: cutlass.Int32,
    features: cutlass.Int32,
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 256 + thread
    if i < count:
        value = x[i] + bias[i % features]
        if value < 0.0:
            value = cutlass.Float32(0.0)
        out[i] = value + residual[i]


@cute.jit
def bias_relu_add_launch(
    x: cute.Tensor,
    bias: cute.Tensor,
    residual: cute.Tensor,
    out: cute.Tensor,
    count: cutlass.Int32,
    features: cutlass.Int32,
):
    bias_relu_add_kernel(x, bias, residual, out, count, features).launch(
        grid=((count + 255) // 256, 1, 1), block=(256, 1, 1)
    )


compiled = []


def bias_relu_add(x, bias, residual):
    x, bias, residual = x.contiguous(), bias.contiguous(), residual.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        tensors = [each.detach().view(-1) for each in (x, bias, residual, out)]
        arguments = [from_dlpack(each).mark_layout_dynamic() for each in tensors]
        arguments += [x.numel(), x.shape[-1]]
        if not compiled:
            compiled.append(cute.compile(bias_relu_add_launch, *arguments))
        compiled[0](*arguments)
    return out


class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(features))

    def forward(self, x, residual):
        return bias_relu_add(x, self.bias, residual)
"""


class Cute(Language):
    packages = {"nvidia-cutlass-dsl": "cutlass"}
    extra = "cute"
    means = "custom kernels in NVIDIA's CuTe DSL (`cutlass.cute`) for an NVIDIA GPU"
    example = EXAMPLE
    sign = re.compile(r"^[ \t]*(?:import|from) cutlass\b", re.MULTILINE)
    jit_cache = "CUTE_DSL_CACHE_DIR"
    compiler_errors = r"^cutlass\..*DSL(?!Cuda)"
    launch_errors = r"^cutlass\..*DSLCuda"

    def watch(self, tracer: Tracer) -> None:
        """Every way to call a compiled function ends in one of these (4.8.1)."""
        from cutlass.base_dsl.jit_executor import JitExecutor

        def seen(owner: type, method: str) -> None:
            original = getattr(owner, method)

            def launch(compiled: object, *args: object, **kwargs: object) -> object:
                module = getattr(compiled, "jit_module", compiled)
                name = str(getattr(module, "function_name", "cute kernel"))
                return tracer.watch(name, partial(original, compiled), args, kwargs)

            setattr(owner, method, launch)

        seen(JitExecutor, "run_compiled_program")
        with suppress(ImportError):  # an extra of its own
            from cutlass.cutlass_dsl import tvm_ffi_provider as ffi

            seen(ffi.TVMFFIJitCompiledFunction, "__call__")
            seen(ffi.TVMFFIJitCompiledFunctionWithKwargs, "__call__")


LANGUAGE = Cute("cute")
