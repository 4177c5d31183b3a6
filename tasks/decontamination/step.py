"""Prefect's view of the choice of training tasks."""

from __future__ import annotations

from prefect import task

from tasks.decontamination import stage
from tasks.decontamination.config import DecontaminationConfig, DeduplicationConfig
from tasks.policy import rows_of, sentence, stage_options
from tasks.store.snapshot import SnapshotRef


def _choose_training_tasks(tasks: SnapshotRef, **_: object) -> str:
    return f"leave out of {rows_of(tasks)} tasks those that the benchmark knows"


@task(
    name="choose training tasks",
    task_run_name=sentence(_choose_training_tasks),
    **stage_options(stage.planned),
)
def choose_tasks(
    tasks: SnapshotRef,
    benchmark: SnapshotRef | None,
    decontamination: DecontaminationConfig,
    deduplication: DeduplicationConfig,
) -> SnapshotRef:
    return stage.run(tasks, benchmark, decontamination, deduplication)
