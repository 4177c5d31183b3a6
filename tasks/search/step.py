"""Prefect's view of a search: a task run per generation."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from tasks.policy import RETRIED


@task(
    name="search a generation",
    task_run_name="generation {number} of the search",
    cache_policy=NO_CACHE,
    **RETRIED,
)
def run_generation(search: Any, number: int) -> int:
    """Return the generation's number of candidates. A retry does only what is missing."""
    count = int(search.run_generation(number))
    text = "generation %d: %d candidates; %.3g x so far, not confirmed"
    get_run_logger().info(text, number, count, search.gain)
    return count
