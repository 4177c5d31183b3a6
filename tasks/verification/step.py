"""Prefect's view of verification: one task run per chunk of candidates, never one per candidate."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from kernels_eval.records import Language
from tasks.policy import RETRIES, RETRY_DELAYS_S, infrastructure_only
from tasks.store import SnapshotRef
from tasks.verification.config import VerificationConfig
from tasks.verification.stage import Verification


@task(
    name="verify a chunk", task_run_name="verify chunk {number} of {chunks}", cache_policy=NO_CACHE,
    retries=RETRIES, retry_delay_seconds=RETRY_DELAYS_S, retry_condition_fn=infrastructure_only,
)  # fmt: skip
def verify_chunk(work: Any, pool: Any, chunk: Any, number: int, chunks: int, done: int) -> dict[str, int]:
    """Returns how many verdicts of each status. Resumable: a retry does only what has no verdict yet."""
    return work.verify(pool, chunk, done)


def verify(candidates: SnapshotRef, tasks: SnapshotRef, config: VerificationConfig, language: Language) -> SnapshotRef:
    """The verification stage inside a flow: its chunks are task runs, its snapshot the cache."""
    work = Verification(candidates, tasks, config, language)
    if work.snapshot.finished:
        return work.snapshot.ref
    pending = work.pending()
    if pending:
        done = work.total - len(pending)
        chunks = list(work.chunks(pending))
        with work.pool() as pool:
            for number, chunk in enumerate(chunks, start=1):
                verify_chunk(work, pool, chunk, number, len(chunks), done)
                done += len(chunk)
    return work.publish()
