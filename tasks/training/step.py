"""Prefect's view of training."""

from __future__ import annotations

from prefect import task

from tasks.policy import stage_options
from tasks.store import SnapshotRef
from tasks.training import stage
from tasks.training.recipe import TrainingRecipe


@task(name="train the adapter", task_run_name="train {recipe.base_model} with LoRA r={recipe.lora_rank}", **stage_options(stage.planned))
def train(curated: SnapshotRef, recipe: TrainingRecipe, prompts: dict[str, str]) -> SnapshotRef:
    return stage.run(curated, recipe, prompts)
