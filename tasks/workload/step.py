"""Prefect's view of counting what references compute and of profiling them."""

from __future__ import annotations

from prefect import task

from tasks.policy import rows_of, sentence, stage_options
from tasks.store import SnapshotRef
from tasks.workload import operator_times, stage
from tasks.workload.config import ProfilingConfig, WorkloadConfig


def _count_what_tasks_compute(tasks: SnapshotRef, config: WorkloadConfig) -> str:
    return f"count what the references of {rows_of(tasks)} tasks compute"


@task(
    name="count what tasks compute",
    task_run_name=sentence(_count_what_tasks_compute),
    **stage_options(stage.planned),
)
def measure_workloads(tasks: SnapshotRef, config: WorkloadConfig) -> SnapshotRef:
    """`stage.run` as a Prefect task."""
    return stage.run(tasks, config)


@task(
    name="profile the references",
    task_run_name="see where the references spend their time",
    **stage_options(operator_times.planned),
)
def profile_references(
    tasks: SnapshotRef, config: ProfilingConfig, device: str, device_name: str
) -> SnapshotRef:
    """`operator_times.run` as a Prefect task."""
    return operator_times.run(tasks, config, device, device_name)
