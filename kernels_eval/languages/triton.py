"""Triton kernels, compiled by Triton when they are first launched."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from kernels_eval.languages import Language, Tracer
from kernels_eval.sandbox.trees import named

COMPILERS = 8
"""Threads that compile the configurations of one kernel."""

EXAMPLE = """\
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


class Triton(Language):
    packages = {"triton": "triton"}
    means = "custom Triton kernels for an NVIDIA GPU"
    example = EXAMPLE
    sign = re.compile(r"^[ \t]*(?:@triton\.|(?:import|from) triton\b)", re.MULTILINE)
    jit_cache = "TRITON_CACHE_DIR"
    compiler_errors = r"^triton\.compiler\.(?!compiler\b)"
    compiler_frames = (
        r"triton\.compiler\.code_generator\.|triton\.compiler\.compiler\.(compile|make_\w+)$"
    )
    launch_errors = r"^triton\..*\.OutOfResources$"

    def watch(self, tracer: Tracer) -> None:
        from triton.runtime.jit import JITFunction

        original = JITFunction.run

        def run(kernel: JITFunction, *args: object, **kwargs: object) -> object:
            if kwargs.get("warmup"):  # is compiled, not launched
                return original(kernel, *args, **kwargs)
            name = getattr(kernel, "__name__", None) or kernel.fn.__name__
            return tracer.watch(name, lambda *a, **k: original(kernel, *a, **k), args, kwargs)

        JITFunction.run = run
        with suppress(ImportError):  # a part of Triton that it does not document
            compile_together()

    def relocate(self, folder: Path, former: str) -> None:
        for path in named(folder, "__grp__*.json"):  # lists the files of a kernel by their paths
            path.write_text(path.read_text().replace(former, str(folder)))


def compile_together() -> None:
    """Have the configurations among which a kernel is tuned compiled beside each other: Triton
    compiles each before it times it, while its device waits.
    """
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs  # asked once for each tuning

    def prune_and_compile(tuner: Any, kwargs: dict[str, Any]) -> list[Any]:
        configs: list[Any] = prune(tuner, kwargs)
        given = {**tuner.nargs, **kwargs, "warmup": True}
        threads = ThreadPoolExecutor(COMPILERS)
        with threads, AsyncCompileMode(threads, ignore_errors=True):
            for config in configs:
                with suppress(Exception):  # it is met again where this one is timed
                    tuner.fn.run(**given, **config.all_kwargs())
        return configs

    Autotuner.prune_configs = prune_and_compile


LANGUAGE = Triton("triton")
