"""Prefect's view of verification and confirmation: a task run per chunk."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from tasks.policy import RETRIED, sentence
from tasks.verification import confirmation, stage
from tasks.verification.stage import Verification


def _verify_a_chunk(work: Verification, number: int) -> str:
    size = work.config.chunk_size
    first, last = size * (number - 1) + 1, min(size * number, work.planned)
    known = work.total - work.planned
    others = f"; the other {known:,} need no worker" if known else ""
    return (
        f"{work.verb} candidates {first:,} to {last:,} of {work.planned:,} (chunk {number} of"
        f" {work.chunks}{others})"
    )


@task(
    name="verify a chunk",
    task_run_name=sentence(_verify_a_chunk, "verify a chunk"),
    cache_policy=NO_CACHE,
    **RETRIED,
)
def verify_chunk(work: Any, number: int) -> dict[str, int]:
    """Return the chunk's verdicts by status. A retry takes only missing verdicts.

    Prefect gets the number and an opaque handle, never candidates.
    """
    counts = Counter[str](work.verify_chunk(number))
    each = ", ".join(f"{status} {count:,}" for status, count in counts.most_common())
    total = f"{counts.total():,}"
    get_run_logger().info("chunk %d of %d: %s verdicts: %s", number, work.chunks, total, each)
    return dict(counts)


verify = partial(stage.run, verify_chunk=verify_chunk)
confirm = partial(confirmation.run, verify_chunk=verify_chunk)
for name, step in {"verify": verify, "confirm": confirm}.items():
    vars(step)["name"] = name  # as that of a task, for who calls it
