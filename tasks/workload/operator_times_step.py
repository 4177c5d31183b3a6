"""Prefect's view of profiling what references spend their time on."""

from __future__ import annotations

from prefect import task

from tasks.policy import stage_options
from tasks.store.snapshot import SnapshotRef
from tasks.workload import operator_times_stage as stage
from tasks.workload.operator_times_config import ProfilingConfig


@task(
    name="profile the references",
    task_run_name="see where the references spend their time",
    **stage_options(stage.planned),
)
def profile_references(
    tasks: SnapshotRef, config: ProfilingConfig, device: str, device_name: str
) -> SnapshotRef:
    return stage.run(tasks, config, device, device_name)
