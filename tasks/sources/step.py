"""Prefect's view of the task source, uncached: reading is quick, and content addresses the
snapshot."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.policy import RETRIED, sentence
from tasks.sources import stage
from tasks.sources.config import TasksConfig


def _load_tasks(config: TasksConfig, **_: object) -> str:
    return f"load {config.in_words}"


load_tasks = task(
    name="load tasks",
    task_run_name=sentence(_load_tasks, "load tasks"),
    cache_policy=NO_CACHE,
    **RETRIED,
)(stage.run)
