"""Prefect's view of counting and profiling references."""

from __future__ import annotations

from tasks.policy import rows_of, stage_task
from tasks.workload import operator_times, stage

measure_workloads = stage_task(
    stage.run,
    stage.planned,
    "count what tasks compute",
    lambda tasks, **_: (
        f"count the operations of {rows_of(tasks)} references of {tasks.stage}"
        f" {tasks.fingerprint[:8]}"
    ),
)
profile_references = stage_task(
    operator_times.run,
    operator_times.planned,
    "profile the references",
    lambda **_: "profile the references by operator",
)
