"""Correct candidates in, the quality flags of their reasoning out: what curation counts, and leaves
out where it is told to.

Guarantees: one row for each correct candidate of the verdicts; a trace that any snapshot under the
root has measured with the same thresholds is not read again, so a night pays for new samples only;
a killed run resumes; texts are read a batch at a time, so that memory follows the number of threads
and not of samples. Does not guarantee that a flagged trace is bad (`tasks.curation.quality`).
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing

import polars as pl
import pyarrow as pa

from kernels_eval.records import stable_hash
from tasks.curation.config import FLAGS, QualityConfig
from tasks.curation.quality import MEASURES, batches, quality
from tasks.curation.tables import places_of
from tasks.progress import report
from tasks.store import Snapshot, SnapshotRef, fingerprint, known_rows
from tasks.versions import TRACE_FLAG_VERSION

STAGE = "trace-flags"
MAX_THREADS = 8
BATCH_CHARACTERS, BATCH_TEXTS = 2_000_000, 2_000
KINDS = {
    "doubt_per_1000_words": pa.float64(),
    "unclosed_fence": pa.bool_(),
    "unclosed_thought": pa.bool_(),
    "ends_mid_sentence": pa.bool_(),
}
TRACE_FLAGS = pa.schema(
    [
        # hash(candidate_id, thresholds, measuring code): lets a refresh reuse the row
        ("flag_key", pa.string()),
        ("candidate_id", pa.string()),
        ("trace_flags", pa.list_(pa.string())),  # those of FLAGS that are raised
        *(
            (name, KINDS.get(name, pa.float64() if name.endswith("share") else pa.int64()))
            for name in MEASURES
        ),
    ]
)


def planned(verdicts: SnapshotRef, candidates: SnapshotRef, config: QualityConfig) -> Snapshot:
    """The snapshot that `run` with the same arguments fills."""
    upstream = [verdicts.fingerprint, candidates.fingerprint]
    key = fingerprint(STAGE, config.identity, upstream, TRACE_FLAG_VERSION)
    return Snapshot(verdicts.root, STAGE, key)


def run(verdicts: SnapshotRef, candidates: SnapshotRef, config: QualityConfig) -> SnapshotRef:
    """A finished snapshot of TRACE_FLAGS. Its manifest counts each flag. A candidate without
    reasoning has no flag."""
    snapshot = planned(verdicts, candidates, config)
    if snapshot.finished:
        return snapshot.ref
    wanted = correct_among(verdicts.open(), candidates.open())
    conditions = [config.identity, TRACE_FLAG_VERSION]
    key_of = {name: stable_hash([name, conditions]) for name in wanted["candidate_id"]}
    snapshot.recover(TRACE_FLAGS)
    there = snapshot.keys("flag_key")
    missing = [key for key in key_of.values() if key not in there]
    known = known_rows(
        snapshot.root, STAGE, "flag_key", missing, TRACE_FLAGS, exclude=snapshot.fingerprint
    )
    snapshot.append(known, TRACE_FLAGS)
    done = snapshot.index(["candidate_id"])
    left = wanted.join(done, on="candidate_id", how="anti", maintain_order="left")
    count = wanted.height - left.height
    rows = candidates.open().rows_of(left, ["candidate_id", "reasoning"])
    texts = ((row["candidate_id"], row["reasoning"]) for row in rows)
    with closing(flagged(texts, config)) as measured, snapshot.journal(TRACE_FLAGS) as add:
        for frame in measured:
            for row in frame.to_dicts():
                add(row | {"flag_key": key_of[row["candidate_id"]]})
            count += frame.height
            report(STAGE, count, wanted.height, "")
    flags = snapshot.read(columns=["candidate_id", "trace_flags"], unique="candidate_id")
    return snapshot.publish(
        config=config.identity,
        upstream=[verdicts.fingerprint, candidates.fingerprint],
        rows=wanted.height,
        extra={"flag_counts": counted(flags)},
    ).ref


def correct_among(verdicts: Snapshot, candidates: Snapshot) -> pl.DataFrame:
    """candidate_id and place of the candidates that a verdict calls correct, part by part."""
    judged = verdicts.read(columns=["candidate_id", "status"], unique="candidate_id")
    if judged.is_empty():
        judged = pl.DataFrame(schema={"candidate_id": pl.String, "status": pl.String})
    return places_of(candidates, judged.filter(pl.col("status") == "correct"))


def flagged(
    texts: Iterable[tuple[str, str | None]], config: QualityConfig
) -> Generator[pl.DataFrame]:
    """candidate_id, `trace_flags` and MEASURES of traces (id, text), a batch at a time, in no
    particular order; several threads measure."""
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    pool = ThreadPoolExecutor(threads)
    running: set[Future[pl.DataFrame]] = set()
    try:
        for batch in batches(texts, lambda pair: len(pair[1] or ""), BATCH_CHARACTERS, BATCH_TEXTS):
            running.add(pool.submit(_measured, batch, config))
            if len(running) > threads:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        for future in running:
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _measured(batch: list[tuple[str, str | None]], config: QualityConfig) -> pl.DataFrame:
    names, texts = zip(*batch, strict=True)
    raised = pl.concat_list(pl.when(name).then(pl.lit(name)) for name in FLAGS).list.drop_nulls()
    ids = pl.Series("candidate_id", names, dtype=pl.String)
    return quality(texts, config).select(ids, raised.alias("trace_flags"), *MEASURES)


def counted(rows: pl.DataFrame) -> dict[str, int]:
    """How many rows have each flag, in the order of FLAGS, zeros included."""
    raised = rows["trace_flags"].to_list() if rows.height else []
    return {name: sum(name in (flags or ()) for flags in raised) for name in FLAGS}
