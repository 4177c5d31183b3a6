"""TRL's, PEFT's and transformers' settings of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from trl.trainer.sft_config import SFTConfig

from tasks.training import checkpoints
from tasks.training.recipe import FIXED, FSDP2, TrainingRecipe


def lora_config(recipe: TrainingRecipe) -> LoraConfig:
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_rank,  # scaled by alpha / r = 1
        lora_dropout=recipe.lora_dropout,
        target_modules=list(FIXED.target_modules),
        bias="none",
    )


def sft_config(recipe: TrainingRecipe, out_dir: Path) -> SFTConfig:
    gpu = torch.cuda.is_available()
    return SFTConfig(
        output_dir=str(out_dir),
        num_train_epochs=recipe.num_epochs,
        per_device_train_batch_size=recipe.batch_size,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=recipe.passes_per_worker,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type=FIXED.lr_schedule,
        warmup_steps=FIXED.warmup_share,  # below 1 it is a share of all steps
        optim="adamw_torch_fused",
        weight_decay=FIXED.weight_decay,
        max_grad_norm=FIXED.max_grad_norm,
        bf16=gpu,
        # rows above the recipe's max_length are already out: TRL must not truncate
        max_length=None,
        packing=False,
        completion_only_loss=True,
        # each completion token counts the same, on whichever worker it is
        average_tokens_across_devices=True,
        logging_steps=1,
        logging_nan_inf_filter=False,  # a loss that is no number shall be seen
        save_strategy="epoch",
        save_total_limit=checkpoints.KEPT,
        seed=recipe.seed,
        **machine_settings(gpu=gpu),
        **sharding(recipe, gpu=gpu),
    )


def machine_settings(*, gpu: bool) -> dict[str, Any]:
    return {
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": not gpu,
        "dataloader_pin_memory": gpu,
    }


def sharding(recipe: TrainingRecipe, *, gpu: bool) -> dict[str, Any]:
    # accelerated layers recompute by a plan of their own
    recomputed = gpu and recipe.acceleration == "off"
    if not recipe.sharded:
        # each pass uses every trained parameter: looking for others takes time, and with
        # recomputation fails
        return {"gradient_checkpointing": recomputed, "ddp_find_unused_parameters": False}
    # transformers' recomputation and not FSDP's own: below that one accelerate and PEFT restore no
    # adapter from a checkpoint, silently
    return {"gradient_checkpointing": recomputed, **FSDP2}
