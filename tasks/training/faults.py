"""Errors of training with their numbers and fixes: running out of memory is one UsageError; a base
model without a projection is refused, which PEFT ignores silently."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernels_eval.errors import EvalError, UsageError, cause_of
from tasks.training.formatting import Example
from tasks.training.recipe import FIXED, TrainingRecipe

MEMORY_WORDS = (
    "DefaultCPUAllocator",  # torch's allocator on the host raises a plain RuntimeError
    "CUDA out of memory",
    # torch.AcceleratorError, where a library and not torch's allocator asked for it
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",  # NCCL
    "Cannot allocate memory",
)
WAYS_OUT = (
    "share the weights among more GPUs (training.workers with parallelism fsdp2), drop the longest"
    " rows (max_length), lower batch_size, or take a smaller base_model"
)
GIB = 2**30


def explain(
    error: Exception,
    recipe: TrainingRecipe,
    examples: Sequence[Example],
    device: str,
    out_dir: Path,
) -> EvalError:
    """The error to raise instead of `error`: UsageError for too little memory, else EvalError."""
    if is_out_of_memory(error):
        return out_of_memory(error, recipe, examples, device)
    return EvalError(
        f"training failed: {type(error).__name__}: {cause_of(error)}",
        f"fix the cause and run it again to resume from {out_dir / 'checkpoints'}",
    )


def is_out_of_memory(error: BaseException | None) -> bool:
    import torch

    seen = 0
    while error is not None and seen < 10:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
            word in str(error) for word in MEMORY_WORDS
        ):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


def out_of_memory(
    error: Exception, recipe: TrainingRecipe, examples: Sequence[Example], device: str
) -> UsageError:
    gpu = device == "cuda"
    recomputed = gpu or recipe.acceleration == "on"
    longest = max(example.tokens for example in examples)
    return UsageError(
        f"out of memory while training {recipe.base_model} on {_memory_of(device)}{_rank()}:"
        f" {cause_of(error)}; batch_size {recipe.batch_size} x up to {longest} tokens,"
        f" {'bfloat16' if gpu else 'float32'}, recomputation"
        f" {'on' if recomputed else 'off'}, parallelism {recipe.parallelism} over"
        f" {recipe.workers}",
        WAYS_OUT,
    )


def require_projections(model: Any, recipe: TrainingRecipe) -> None:
    """Raise UsageError where a projection matches no layer of the model: PEFT silently trains the
    others."""
    import torch

    layers = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    everything = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    missing = [name for name in FIXED.target_modules if name not in everything]
    if missing:
        raise UsageError(
            f"{recipe.base_model} ({type(model).__name__}) has no layer named {', '.join(missing)}",
            "train a model with all seven (its linear layers:"
            f" {', '.join(sorted(layers)) or 'none'})",
        )


def _rank() -> str:
    rank, size = os.environ.get("RANK"), int(os.environ.get("WORLD_SIZE", "1"))
    return f" (worker {rank} of {size})" if rank is not None and size > 1 else ""


def _memory_of(device: str) -> str:
    if device == "cuda":
        import torch

        here = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(here)
        used = torch.cuda.max_memory_reserved(here) / GIB
        return (
            f"{properties.name} with {properties.total_memory / GIB:.1f} GiB, {used:.1f} GiB taken"
            " at most"
        )
    import psutil

    total = psutil.virtual_memory().total / GIB
    return (
        f"the CPU with {total:.1f} GiB, {psutil.Process().memory_info().rss / GIB:.1f} GiB taken by"
        " this process"
    )
