"""Reinforcement: the adapter of a training answers tasks, the verifier judges, GRPO learns."""

from __future__ import annotations

from flows.config import PipelineConfig
from flows.rollouts import environment
from flows.runtime.guard import guarded_flow
from flows.track import reinforcement_record, track
from flows.train import of_line, prompts_for
from kernels_eval.errors import UsageError
from kernels_eval.records import Json
from tasks.policy import ProgressArtifact
from tasks.progress import observed_by
from tasks.sources.small_model import resolve_model
from tasks.sources.stage import read_tasks
from tasks.store.lookup import find_snapshot, newest_first
from tasks.store.snapshot import SnapshotRef
from tasks.training import reinforce
from tasks.training.stage import STAGE as TRAINING
from tasks.training.stage import adapter_of


@guarded_flow("reinforce the adapter", "reinforce")
def reinforce_adapter(
    config: PipelineConfig, tasks: SnapshotRef, trained: SnapshotRef
) -> SnapshotRef:
    """GRPO on the training tasks, from the adapter of a finished training."""
    prompts, recipe = prompts_for(config, tasks), config.reinforcement
    snapshot = reinforce.planned(trained, recipe, prompts)
    if snapshot.finished:
        return snapshot.ref
    resolve_model(str(trained.open().manifest["base_model"]), trained.root)  # before any worker
    known = {task.task_id: task for task in read_tasks(tasks)}
    with (
        observed_by(ProgressArtifact("reinforcement-progress", "share of optimiser steps done")),
        environment(config, known, prompts) as made,
    ):
        return reinforce.run(trained, recipe, prompts, made)


@guarded_flow("reinforce and track", "reinforce and track")
def reinforce_and_track(
    config: PipelineConfig, tasks: SnapshotRef, trained: SnapshotRef
) -> tuple[SnapshotRef, str | None]:
    """`reinforce_adapter`, and its run in MLflow: None where tracking is off or failed."""
    reinforced = reinforce_adapter.fn(config, tasks, trained)
    return reinforced, track(reinforcement_record, config, reinforced)


def of_training(
    config: PipelineConfig, name: str | None
) -> tuple[PipelineConfig, SnapshotRef, SnapshotRef]:
    """(configuration, tasks, training) of a finished training: its fingerprint under the root, its
    directory, or the newest. Language and prompts are those of its training set.

    Raises UsageError where there is none, or what it was made from is missing.
    """
    there = newest_first(config.root, TRAINING)
    if not (name or there):
        raise UsageError(f"{config.root} holds no finished training", "run `concur train` first")
    trained = find_snapshot(config.root, name, TRAINING) if name else there[0].ref
    config, tasks, _ = of_line(trained.root, trained.open().manifest["upstream"][0], config)
    return config, tasks, trained


def summary_of(trained: SnapshotRef, reinforced: SnapshotRef) -> Json:
    """What a finished reinforcement learned, (first step, last step), and where the adapter is."""
    snapshot = reinforced.open()
    log = snapshot.read(unique="step").sort("step")
    return {
        "training": trained.fingerprint,
        "reinforcement": reinforced.fingerprint,
        "tasks": snapshot.manifest["tasks"],
        "steps": len(log),
        "reward": (log["reward"][0], log["reward"][-1]),
        "correct": (log["status/correct"][0], log["status/correct"][-1]),
        "rejected": (log["status/rejected"][0], log["status/rejected"][-1]),
        "adapter": str(adapter_of(reinforced).absolute()),
    }
