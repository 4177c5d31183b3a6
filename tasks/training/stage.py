"""Training set in, adapter out: a snapshot whose rows are the training log and whose `adapter`
folder is the result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kernels_eval.records import Language
from tasks.progress import report
from tasks.sources.small_model import resolve_model
from tasks.sources.stage import read_tasks
from tasks.store import Snapshot, SnapshotRef, fingerprint
from tasks.training.evaluation import COLUMN as HELD_OUT
from tasks.training.evaluation import with_held_out
from tasks.training.recipe import TrainingRecipe
from tasks.training.telemetry import COLUMNS as TELEMETRY
from tasks.versions import TRAINING_VERSION

if TYPE_CHECKING:
    from tasks.training.trainer import TrainingResult

STAGE = "training"
MEASURED = ("epoch", "loss", "learning_rate", "grad_norm", "num_tokens", HELD_OUT, *TELEMETRY)
HISTORY = pa.schema([("step", pa.int64()), *((name, pa.float64()) for name in MEASURED)])
"""One row an optimiser step; step 0, where held-out tasks were measured before the first, has that
loss and nothing else."""


def planned(curated: SnapshotRef, recipe: TrainingRecipe, prompts: dict[str, str]) -> Snapshot:
    """The snapshot that `run` with the same arguments fills."""
    config = [recipe.model_dump(mode="json"), sorted(prompts.items())]
    name = fingerprint(STAGE, config, [curated.fingerprint], TRAINING_VERSION)
    return Snapshot(curated.root, STAGE, name)


def run(curated: SnapshotRef, recipe: TrainingRecipe, prompts: dict[str, str]) -> SnapshotRef:
    """Train on a curated snapshot. `prompts` maps task_id to the prompt its candidates answered.

    Returns a finished snapshot: rows are the log (one per optimiser step), `adapter/` holds the
    LoRA adapter. A killed run resumes from its newest checkpoint. Raises what `trainer.train`
    raises.
    """
    snapshot = planned(curated, recipe, prompts)
    if snapshot.finished:
        return snapshot.ref
    from kernels_eval.cluster.ray import start_ray
    from tasks.training.launch import train_on_ray

    start_ray()
    rows = list(curated.open().read(unique="candidate_id").iter_rows(named=True))
    base = resolve_model(recipe.base_model, curated.root)
    steps = -(-len(rows) // recipe.rows_per_step) * recipe.num_epochs
    result = train_on_ray(
        rows,
        recipe,
        base,
        snapshot.local_dir(),
        lambda row: prompts[row["task_id"]],
        lambda entry: report(
            STAGE, int(entry.get("step", 0)), steps, f"loss {entry.get('loss', float('nan')):.3f}"
        ),
    )
    done = {int(step) for step in snapshot.keys("step")}
    _describe(result, recipe, base, curated)
    log = training_log(result)
    snapshot.append([entry for entry in log if entry["step"] not in done], HISTORY)
    extra = result.model_dump(mode="json", exclude={"history", "telemetry", "adapter_dir"}) | {
        "adapter": "adapter",
        "base_model": base,
    }
    return snapshot.publish(
        config=recipe, upstream=[curated.fingerprint], rows=len(log), extra=extra
    ).ref


def _describe(
    result: TrainingResult, recipe: TrainingRecipe, base: str, curated: SnapshotRef
) -> None:
    """Write the card into the adapter's directory, which is read as vLLM will. Raises UsageError
    for an adapter that vLLM cannot serve."""
    from tasks.training.adapter import check_adapter
    from tasks.training.card import CardFacts, write_card

    manifest = curated.open().manifest
    facts = CardFacts(
        name=f"concur-{curated.fingerprint[:12]}",
        base_model=base,
        adapter=check_adapter(result.adapter_dir, max_rank=recipe.lora_rank),
        recipe=recipe,
        result=result,
        curated=curated.fingerprint,
        strategy=(manifest.get("config") or {}).get("strategy"),
        tools=manifest["tools"],
    )
    write_card(result.adapter_dir, facts)


def training_log(result: TrainingResult) -> list[dict[str, Any]]:
    """Rows of HISTORY: what each step learned, what it took, and the held-out loss where it was
    measured."""
    took = {entry["step"]: entry for entry in result.telemetry}
    steps = [{**entry, **took.get(entry["step"], {})} for entry in result.history]
    return [
        {name: row.get(name) for name in HISTORY.names}
        for row in with_held_out(steps, result.held_out)
    ]


def adapter_of(training: SnapshotRef) -> Path:
    """The adapter's directory of a finished training snapshot."""
    return training.open().local_dir("adapter")


def prompts_of(
    tasks: SnapshotRef, language: Language, render: Callable[..., str], hardware: str | None = None
) -> dict[str, str]:
    """task_id -> rendered prompt; `render` is handed in because stages do not import each other."""
    return {task.task_id: render(task, language, hardware) for task in read_tasks(tasks)}
