"""Prefect's view of a search: one task run per generation, never one per candidate."""

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
    """Return how many candidates the generation has. A retry proposes and verifies only what is
    missing."""
    count = int(search.run_generation(number))
    text = "generation %d: %d candidates; %.3g x so far, not confirmed"
    get_run_logger().info(text, number, count, search.gain)
    return count
