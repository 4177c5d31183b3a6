"""Training the adapter on a curated snapshot."""

from __future__ import annotations

from prefect import flow

from flows.config import PipelineConfig
from flows.naming import run_name
from flows.runtime.guard import guarded
from flows.runtime.notices import NOTICES
from flows.track import Tracked, track_training
from tasks.policy import ProgressArtifact, call_stage
from tasks.progress import observed_by
from tasks.store.snapshot import SnapshotRef
from tasks.synthesis.prompts import render
from tasks.training.stage import prompts_of
from tasks.training.step import train


@flow(name="train the adapter", flow_run_name=run_name("train"), **NOTICES)
def train_adapter(config: PipelineConfig, tasks: SnapshotRef, curated: SnapshotRef) -> SnapshotRef:
    """LoRA on the curated set: the prompts are those the candidates answered."""
    prompts = prompts_of(tasks, config.language, render, config.synthesis.hardware)
    with (
        guarded(config.guarded),
        observed_by(ProgressArtifact("training-progress", "share of optimiser steps done")),
    ):
        return call_stage(train, curated, config.training, prompts)


@flow(name="train and track", flow_run_name=run_name("train and track"), **NOTICES)
def train_and_track(
    config: PipelineConfig, tasks: SnapshotRef, curated: SnapshotRef
) -> tuple[SnapshotRef, Tracked | None]:
    """`train_adapter` by itself, and what MLflow is told of it: None where tracking is off or
    MLflow failed."""
    trained = train_adapter(config, tasks, curated)
    return trained, track_training(config, curated, trained)
