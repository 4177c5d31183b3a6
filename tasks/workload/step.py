"""Prefect's view of counting and profiling references."""

from __future__ import annotations

from tasks.policy import rows_of, stage_task
from tasks.sources.config import TasksConfig
from tasks.sources.stage import STAGE
from tasks.store.snapshot import SnapshotRef
from tasks.workload import operator_times, stage


def _words_for(tasks: SnapshotRef) -> str:
    if tasks.stage != STAGE:
        return f"the {rows_of(tasks)} tasks that remain"
    config = TasksConfig.model_validate(tasks.open().manifest["config"])
    return f"the {rows_of(tasks)} {config.in_words}"


measure_workloads = stage_task(
    stage.run,
    stage.planned,
    "count what tasks compute",
    lambda tasks, **_: f"count what {_words_for(tasks)} compute",
)
profile_references = stage_task(
    operator_times.run,
    operator_times.planned,
    "profile the references",
    lambda **_: "profile the references by operator",
)
