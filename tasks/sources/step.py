"""Prefect's view of the task source, uncached: reading is quick, and content addresses the
snapshot."""

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
