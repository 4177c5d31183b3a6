"""The reinforcement stage: an adapter in, a better one out. Rows are the log, one per optimiser
step; `adapter/` is the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from kernels_eval.errors import UsageError
from tasks.keys import keyed
from tasks.progress import report
from tasks.reporting.text import plural
from tasks.store import Snapshot, SnapshotRef
from tasks.training.recipe import ReinforceRecipe
from tasks.training.stage import adapter_of
from tasks.versions import TRAINING_VERSION

if TYPE_CHECKING:
    from tasks.training.grpo import Judge

STAGE = "reinforcement"


def planned(trained: SnapshotRef, recipe: ReinforceRecipe, prompts: dict[str, str]) -> Snapshot:
    """The snapshot of this stage. Raises UsageError for fewer tasks than a step takes: TRL would
    end without a step."""
    if len(prompts) < recipe.tasks_per_step:
        raise UsageError(
            f"the training is of {plural(len(prompts), 'task')}, and a step takes"
            f" {recipe.tasks_per_step}",
            f"--set reinforcement.tasks_per_step={len(prompts)}",
        )
    config = [keyed(recipe), sorted(prompts.items())]
    return Snapshot.planned(STAGE, config, [trained], TRAINING_VERSION)


def run(
    trained: SnapshotRef,
    recipe: ReinforceRecipe,
    prompts: dict[str, str],
    judge: Judge,
) -> SnapshotRef:
    """Reinforce the adapter of a finished training on tasks (`prompts`: task_id -> prompt). Returns
    a finished snapshot; a stopped run resumes. Raises what `grpo.reinforce` raises, and UsageError
    for an adapter that vLLM cannot serve."""
    snapshot = planned(trained, recipe, prompts)
    if snapshot.finished:
        return snapshot.ref
    from tasks.training.adapter import check_adapter
    from tasks.training.grpo import reinforce

    before = trained.open()
    base = str(before.manifest["base_model"])

    def tell(row: dict[str, float]) -> None:
        seen = f"reward {row['reward']:.3f}, correct {row['status/correct']:.0%}"
        report(STAGE, int(row["step"]), recipe.steps, seen)

    adapter, log = reinforce(
        prompts, recipe, base, adapter_of(trained), snapshot.local_dir(), judge, tell
    )
    check_adapter(adapter)
    names = dict.fromkeys(name for row in log for name in row)
    columns = {name: pa.int64() if name == "step" else pa.float64() for name in names}
    snapshot.append([dict.fromkeys(names) | row for row in log], pa.schema(columns))
    extra = {"adapter": "adapter", "base_model": base, "tasks": len(prompts)}
    return snapshot.publish(config=recipe, rows=len(log), extra=extra).ref
