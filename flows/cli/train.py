"""`concur train`: an adapter from an existing training set; `concur reinforce`: a better one by
rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from flows.cli.common import command, emit
from kernels_eval.errors import UsageError


@command
def train(
    as_json: bool,
    root: str,
    curated: str | None,
    profile: str,
    overrides: tuple[str, ...],
    merged: str | None,
    merged_dtype: Literal["bfloat16", "float32"],
) -> None:
    """Train an adapter on an existing curated set; print its path and its run in MLflow.

    If the training is stopped, rerun the same command to resume it.
    """
    from flows.config import load_profile
    from flows.launch import embed, served_and_shown
    from flows.ops.control import join_stack
    from tasks.publishing.lineage import find_curated

    join_stack(root)
    given = load_profile(profile, overrides)
    if merged and Path(merged).exists():  # now, and not after hours of training
        raise UsageError(f"{merged} exists", "give a new directory for the merged weights")
    place = find_curated(root, curated).root
    embed(given.model_copy(update={"root": place}))  # before prefect is imported
    from flows.train import merge_trained, of_line, summary_of, train_and_track

    config, tasks, found = of_line(root, curated, given)
    with served_and_shown() as progress:
        trained, tracked = train_and_track(config, tasks, found)
    summary = summary_of(config, found, trained) | {
        "new_work": "training" in progress.worked,
        "seconds": progress.seconds,
        "mlflow": tracked and tracked.model_dump(),
    }
    if merged:
        summary["merged"] = merge_trained(config, tasks, found, trained, Path(merged), merged_dtype)
    emit(summary, as_json, "train")


@command
def reinforce(
    as_json: bool, root: str, training: str | None, profile: str, overrides: tuple[str, ...]
) -> None:
    """Improve a trained adapter with rewards from the verifier (GRPO); print where it is.

    Rerun the same command to resume one that was stopped.
    """
    from flows.config import load_profile
    from flows.launch import embed, served_and_shown
    from flows.ops.control import join_stack

    join_stack(root)
    embed(given := load_profile(profile, [f"root={root}", *overrides]))  # before prefect
    from flows.reinforce import of_training, reinforce_and_track, summary_of

    config, tasks, trained = of_training(given, training)
    with served_and_shown() as progress:
        reinforced, run_id = reinforce_and_track(config, tasks, trained)
    summary = summary_of(trained, reinforced) | {
        "seconds": progress.seconds,
        "mlflow": run_id,
    }
    emit(summary, as_json, "reinforce")
