"""Prefect's view of counting what tasks compute."""

from __future__ import annotations

from prefect import task

from tasks.policy import rows_of, sentence, stage_options
from tasks.store.snapshot import SnapshotRef
from tasks.workload import stage
from tasks.workload.config import WorkloadConfig


def _count_what_tasks_compute(tasks: SnapshotRef, config: WorkloadConfig) -> str:
    return f"count what the references of {rows_of(tasks)} tasks compute"


@task(
    name="count what tasks compute",
    task_run_name=sentence(_count_what_tasks_compute),
    **stage_options(stage.planned),
)
def measure_workloads(tasks: SnapshotRef, config: WorkloadConfig) -> SnapshotRef:
    return stage.run(tasks, config)
