"""Decisions before a model is loaded: device, longest row, held-out examples, parallelism."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from kernels_eval.errors import UsageError
from tasks.training import checkpoints
from tasks.training.acceleration.parallelism import parallelism_for
from tasks.training.formatting import Example, Rows, examples_of, select_examples
from tasks.training.recipe import TrainingRecipe


def training_device(recipe: TrainingRecipe) -> str:
    """The device, "cuda" or "cpu". Raises UsageError for a wrong number of processes, and for a
    lone one with several GPUs: transformers would use nn.DataParallel."""
    together = int(os.environ.get("WORLD_SIZE", "1"))
    if together != recipe.workers:
        raise UsageError(
            f"the recipe trains with {recipe.workers} workers, and {together} were started",
            "call tasks.training.launch.train_on_ray, which starts them, or set workers",
        )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if together == 1 and gpus > 1:
        raise UsageError(
            f"{gpus} GPUs are visible and training uses one",
            "call tasks.training.launch.train_on_ray, or set CUDA_VISIBLE_DEVICES to one GPU",
        )
    return "cuda" if gpus else "cpu"


def longest_allowed(
    recipe: TrainingRecipe, examples: Sequence[Example], base_model_dir: str | Path
) -> int:
    """Row limit in tokens: the recipe's, or the longest row for 'data'; at most the base model's
    positions."""
    longest = max((example.tokens for example in examples), default=0)
    limit = longest if recipe.max_length == "data" else recipe.max_length
    try:
        config = AutoConfig.from_pretrained(str(base_model_dir)).get_text_config()
    except (OSError, ValueError):  # a model without one is reported when it is loaded
        return limit
    return min(limit, getattr(config, "max_position_embeddings", None) or limit)


def held_out_examples(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> list[Example]:
    examples = examples_of(rows, tokenizer)
    try:
        return select_examples(examples, tokenizer, max_length)[0]
    except UsageError:  # none is left
        return []


def with_parallelism(
    recipe: TrainingRecipe, base_model_dir: str | Path, max_length: int
) -> tuple[TrainingRecipe, dict[str, str]]:
    """The recipe with `parallelism: auto` decided equally in all processes, and why."""
    if recipe.parallelism != "auto" or recipe.workers == 1:
        return recipe, {}
    choice, why = "ddp", "without a GPU"
    if torch.cuda.is_available():
        tokens = max_length * recipe.batch_size
        choice, why = parallelism_for(base_model_dir, lora_rank=recipe.lora_rank, tokens=tokens)
    choice, why = checkpoints.agreed((choice, why))
    return recipe.model_copy(update={"parallelism": choice}), {"parallelism": f"{choice}: {why}"}
