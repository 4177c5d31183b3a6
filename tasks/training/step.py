"""Prefect's view of training."""

from __future__ import annotations

from tasks.policy import rows_of, stage_task
from tasks.training import stage

train = stage_task(
    stage.run,
    stage.planned,
    "train the adapter",
    lambda curated, recipe, **_: (
        f"train {recipe.base_model} on {rows_of(curated)} rows for {recipe.num_epochs} epochs"
        f" (LoRA, rank {recipe.lora_rank})"
    ),
)
