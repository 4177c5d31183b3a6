"""Prefect's view of training."""

from __future__ import annotations

from prefect import task

from tasks.policy import rows_of, sentence, stage_options
from tasks.store.snapshot import SnapshotRef
from tasks.training import stage
from tasks.training.recipe import TrainingRecipe


def _train_the_adapter(curated: SnapshotRef, recipe: TrainingRecipe, **_: object) -> str:
    return (
        f"train {recipe.base_model} on {rows_of(curated)} rows for {recipe.num_epochs} epochs"
        f" (LoRA, rank {recipe.lora_rank})"
    )


@task(
    name="train the adapter",
    task_run_name=sentence(_train_the_adapter),
    **stage_options(stage.planned),
)
def train(curated: SnapshotRef, recipe: TrainingRecipe, prompts: dict[str, str]) -> SnapshotRef:
    return stage.run(curated, recipe, prompts)
