"""Prefect's view of the task source. Not cached: reading is quick, and the snapshot is addressed by
what was read."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.policy import RETRIED
from tasks.sources import stage

load_tasks = task(
    name="load tasks",
    task_run_name="load {config.source} tasks",
    cache_policy=NO_CACHE,
    **RETRIED,
)(stage.run)
