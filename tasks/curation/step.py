"""Prefect's view of curation."""

from __future__ import annotations

from prefect import task

from tasks.curation import stage, training_tasks
from tasks.curation.decontamination import DecontaminationConfig
from tasks.curation.deduplication import DeduplicationConfig
from tasks.curation.strategies import CurationConfig
from tasks.policy import stage_options
from tasks.store import SnapshotRef


@task(name="curate the training set", task_run_name="curate with strategy {config.strategy}", **stage_options(stage.planned))
def curate(verdicts: SnapshotRef, candidates: SnapshotRef, tasks: SnapshotRef, config: CurationConfig) -> SnapshotRef:
    return stage.run(verdicts, candidates, tasks, config)


@task(name="choose training tasks", task_run_name="leave out tasks that the benchmark knows", **stage_options(training_tasks.planned))
def choose_tasks(
    tasks: SnapshotRef, benchmark: SnapshotRef | None, decontamination: DecontaminationConfig, deduplication: DeduplicationConfig
) -> SnapshotRef:
    return training_tasks.run(tasks, benchmark, decontamination, deduplication)
