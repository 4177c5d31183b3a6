"""Prefect's view of verification and confirmation: a task run per chunk."""

from __future__ import annotations

from collections import Counter
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from kernels_eval.records import Language
from tasks.policy import RETRIED, sentence
from tasks.store.snapshot import SnapshotRef
from tasks.verification import stage
from tasks.verification.config import VerificationConfig
from tasks.verification.confirmation import Confirmation, Rule
from tasks.verification.confirmation import run as run_confirmation
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


def verify(
    candidates: SnapshotRef,
    tasks: SnapshotRef,
    config: VerificationConfig,
    language: Language,
    verification: type[Verification] = Verification,
) -> SnapshotRef:
    return stage.run(
        candidates, tasks, config, language, verification=verification, verify_chunk=verify_chunk
    )


def confirm(
    verdicts: SnapshotRef,
    candidates: SnapshotRef,
    tasks: SnapshotRef,
    config: VerificationConfig,
    language: Language,
    rule: Rule,
    confirmation: type[Confirmation] = Confirmation,
) -> SnapshotRef:
    """Confirmation of what a rule keeps, as `verify`."""
    return run_confirmation(
        *(verdicts, candidates, tasks, config, language, rule),
        confirmation=confirmation,
        verify_chunk=verify_chunk,
    )
