"""The training stage: curated set in, adapter out. The snapshot's rows are the training log, its
`adapter` folder the result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kernels_eval.records import Language
from tasks.keys import keyed
from tasks.progress import caution, report
from tasks.sources.small_model import resolve_model
from tasks.sources.stage import read_tasks
from tasks.store import ADAPTER, Snapshot, SnapshotRef, fingerprint
from tasks.training.recipe import TrainingRecipe
from tasks.training.result import HISTORY
from tasks.training.rows import rows_hash, training_rows
from tasks.versions import TRAINING_VERSION

STAGE = "training"


def planned(curated: SnapshotRef, recipe: TrainingRecipe, prompts: dict[str, str]) -> Snapshot:
    """The snapshot that `run` with the same arguments fills: one for all curated sets with the same
    rows. Raises UsageError where the set is unfinished or empty."""
    identity = [keyed(recipe), rows_hash(training_rows(curated, prompts))]
    name = fingerprint(STAGE, identity, version=TRAINING_VERSION)
    return Snapshot(curated.root, STAGE, name, upstream=[curated.fingerprint])


def run(curated: SnapshotRef, recipe: TrainingRecipe, prompts: dict[str, str]) -> SnapshotRef:
    """Train on the rows of a curated snapshot. `prompts` maps task_id to the candidates' prompt.

    Returns a finished snapshot: rows are the log (one per optimiser step), `adapter/` the LoRA
    adapter. A killed run resumes from its newest checkpoint. Raises what `trainer.train` raises,
    and UsageError for an adapter that learned nothing or diverged.
    """
    snapshot = planned(curated, recipe, prompts)
    if snapshot.finished:
        return snapshot.ref
    if snapshot.missing == ADAPTER:
        caution(f"{snapshot.path} has lost its {ADAPTER}: it is trained again")
    from kernels_eval.pool.ray import start_ray
    from tasks.training.adapter import check_adapter
    from tasks.training.card import write_card
    from tasks.training.launch import train_on_ray

    start_ray()
    rows = training_rows(curated, prompts)
    base = resolve_model(recipe.base_model, curated.root)
    steps = -(-len(rows) // recipe.rows_per_step) * recipe.num_epochs

    def tell(entry: dict[str, float]) -> None:
        report(STAGE, int(entry["step"]), steps, f"loss {entry['loss']:.3f}")

    result = train_on_ray(rows.to_dicts(), recipe, base, snapshot.local_dir(), tell)
    manifest = curated.open().manifest
    write_card(
        result,
        recipe,
        check_adapter(result.adapter_dir),
        name=f"concur-{curated.fingerprint[:12]}",
        base_model=base,
        curated=curated.fingerprint,
        strategy=(manifest.get("config") or {}).get("strategy"),
        tools=manifest["tools"],
    )
    snapshot.append(result.log, HISTORY, key="step")
    extra = result.model_dump(mode="json", exclude={"log", "adapter_dir"})
    extra |= {"held_out": result.held_out, "adapter": "adapter", "base_model": base}
    return snapshot.publish(config=recipe, rows=len(result.log), extra=extra).ref


def adapter_of(training: SnapshotRef) -> Path:
    return training.open().local_dir("adapter")


def prompts_of(
    tasks: SnapshotRef, language: Language, render: Callable[..., str], hardware: str | None = None
) -> dict[str, str]:
    """Map task_id to its rendered prompt; `render` is passed in because stages do not import each
    other."""
    return {task.task_id: render(task, language, hardware) for task in read_tasks(tasks)}
