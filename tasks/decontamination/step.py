"""Prefect's view of the choice of training tasks."""

from __future__ import annotations

from prefect import task

from tasks.decontamination import stage
from tasks.decontamination.decontamination import DecontaminationConfig
from tasks.decontamination.deduplication import DeduplicationConfig
from tasks.policy import stage_options
from tasks.store import SnapshotRef


@task(name="choose training tasks", task_run_name="leave out tasks that the benchmark knows", **stage_options(stage.planned))
def choose_tasks(
    tasks: SnapshotRef, benchmark: SnapshotRef | None, decontamination: DecontaminationConfig, deduplication: DeduplicationConfig
) -> SnapshotRef:
    return stage.run(tasks, benchmark, decontamination, deduplication)
