"""Errors of training with their numbers and fixes: running out of memory is one UsageError; a base
model without a projection is refused, which PEFT ignores silently."""

from __future__ import annotations

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


def explain(
    error: Exception,
    recipe: TrainingRecipe,
    examples: Sequence[Example],
    out_dir: Path,
) -> EvalError:
    """The error to raise instead of `error`: UsageError for too little memory, else EvalError."""
    if is_out_of_memory(error):
        return out_of_memory(error, recipe, examples)
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
    error: Exception, recipe: TrainingRecipe, examples: Sequence[Example]
) -> UsageError:
    longest = max(example.tokens for example in examples)
    return UsageError(
        f"out of memory while training {recipe.base_model}: {cause_of(error)}; batch_size"
        f" {recipe.batch_size} x up to {longest} tokens, acceleration {recipe.acceleration},"
        f" parallelism {recipe.parallelism} over {recipe.workers}",
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
