"""Prefect's view of counting what references compute and of profiling them."""

from __future__ import annotations

from prefect import task

from tasks.policy import rows_of, sentence, stage_options
from tasks.store import SnapshotRef
from tasks.workload import operator_times, stage


def _count_what_tasks_compute(tasks: SnapshotRef, **_: object) -> str:
    return f"count the operations of {rows_of(tasks)} references"


measure_workloads = task(
    name="count what tasks compute",
    task_run_name=sentence(_count_what_tasks_compute),
    **stage_options(stage.planned),
)(stage.run)
profile_references = task(
    name="profile the references",
    task_run_name="profile the references by operator",
    **stage_options(operator_times.planned),
)(operator_times.run)
