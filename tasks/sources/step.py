"""Prefect's view of the task source. Not cached: reading is quick, and the snapshot is addressed by
what was read."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.policy import RETRIES, RETRY_DELAYS_S, RETRY_JITTER, infrastructure_only
from tasks.sources import stage
from tasks.sources.config import TasksConfig
from tasks.store.snapshot import SnapshotRef


@task(
    name="load tasks",
    task_run_name="load {config.source} tasks",
    cache_policy=NO_CACHE,
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_condition_fn=infrastructure_only,
    retry_jitter_factor=RETRY_JITTER,
)
def load_tasks(config: TasksConfig, root: str) -> SnapshotRef:
    return stage.run(config, root)
