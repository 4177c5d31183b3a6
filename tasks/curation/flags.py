"""Quality flags of correct candidates' reasoning. Traces that this version measured anywhere under
the root are not read again; a killed run resumes."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing

import polars as pl

from kernels_eval.records import stable_hash
from tasks.curation.config import FLAGS
from tasks.curation.quality import MEASURES, quality
from tasks.curation.tables import places_of
from tasks.progress import report
from tasks.store import Snapshot, SnapshotRef, known_rows
from tasks.tables import CORRECT, TRACE_FLAGS
from tasks.versions import TRACE_FLAG_VERSION

STAGE = "trace-flags"
MAX_THREADS = 8
BATCH_CHARACTERS, BATCH_TEXTS = 2_000_000, 2_000
Trace = tuple[str, str | None]
"""A candidate_id and its reasoning."""


def planned(verdicts: SnapshotRef, candidates: SnapshotRef) -> Snapshot:
    return Snapshot.planned(STAGE, {}, [verdicts, candidates], TRACE_FLAG_VERSION)


def run(verdicts: SnapshotRef, candidates: SnapshotRef) -> SnapshotRef:
    """A finished snapshot of TRACE_FLAGS; its manifest counts flags. No reasoning means no flag."""
    snapshot = planned(verdicts, candidates)
    if snapshot.finished:
        return snapshot.ref
    wanted = correct_among(verdicts.open(), candidates.open())
    key_of = {name: stable_hash([name, TRACE_FLAG_VERSION]) for name in wanted["candidate_id"]}
    snapshot.recover(TRACE_FLAGS)
    there = snapshot.keys("flag_key")
    missing = [key for key in key_of.values() if key not in there]
    snapshot.append(known_rows(snapshot, "flag_key", missing, TRACE_FLAGS), TRACE_FLAGS)
    done = snapshot.index(["candidate_id"])
    left = wanted.join(done, on="candidate_id", how="anti", maintain_order="left")
    count = wanted.height - left.height
    rows = candidates.open().rows_of(left, ["candidate_id", "reasoning"])
    texts = ((row["candidate_id"], row["reasoning"]) for row in rows)
    with closing(flagged(texts)) as measured, snapshot.journal(TRACE_FLAGS) as add:
        for frame in measured:
            for row in frame.to_dicts():
                add(row | {"flag_key": key_of[row["candidate_id"]]})
            count += frame.height
            report(STAGE, count, wanted.height, "")
    flags = snapshot.read(columns=["candidate_id", "trace_flags"], unique="candidate_id")
    return snapshot.publish(
        config={}, rows=wanted.height, extra={"flag_counts": counted(flags)}
    ).ref


def correct_among(verdicts: Snapshot, candidates: Snapshot) -> pl.DataFrame:
    """candidate_id and place of correct candidates, part by part."""
    judged = verdicts.read(columns=["candidate_id", "status"], unique="candidate_id")
    if judged.is_empty():
        judged = pl.DataFrame(schema={"candidate_id": pl.String, "status": pl.String})
    return places_of(candidates, judged.filter(CORRECT))


def flagged(texts: Iterable[Trace]) -> Generator[pl.DataFrame]:
    """candidate_id, `trace_flags` and MEASURES of traces, in batches without order; threads
    measure."""
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    pool = ThreadPoolExecutor(threads)
    running: set[Future[pl.DataFrame]] = set()
    try:
        for batch in _batches(texts):
            running.add(pool.submit(_with_flags, batch))
            if len(running) > threads:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        for future in running:
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(traces: Iterable[Trace]) -> Iterator[list[Trace]]:
    batch: list[Trace] = []
    characters = 0
    for trace in traces:
        batch.append(trace)
        characters += len(trace[1] or "")
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_TEXTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _with_flags(batch: Sequence[Trace]) -> pl.DataFrame:
    names, texts = zip(*batch, strict=True)
    raised = pl.concat_list(pl.when(name).then(pl.lit(name)) for name in FLAGS).list.drop_nulls()
    ids = pl.Series("candidate_id", names, dtype=pl.String)
    return quality(texts).select(ids, raised.alias("trace_flags"), *MEASURES)


def counted(rows: pl.DataFrame) -> dict[str, int]:
    raised = rows["trace_flags"].to_list() if rows.height else []
    return {name: sum(name in (flags or ()) for flags in raised) for name in FLAGS}
