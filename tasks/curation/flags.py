"""Correct candidates in, the quality flags of their reasoning out: what curation counts, and leaves
out where it is told to.

Guarantees: one row for each correct candidate of the verdicts; a trace that any snapshot under the
root has measured with the same thresholds is not read again, so a night pays for new samples only;
a killed run goes on where it was; texts are read a batch at a time, so that memory follows the
number of threads and not of samples. Does not guarantee that a flagged trace is bad
(`tasks.curation.quality`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from typing import TYPE_CHECKING

import pyarrow as pa

from kernels_eval.records import stable_hash
from tasks.curation.quality import FLAGS, MEASURES, QualityConfig, quality
from tasks.progress import report
from tasks.store import Snapshot, SnapshotRef, fingerprint, known_rows
from tasks.versions import TRACE_FLAG_VERSION

if TYPE_CHECKING:
    import polars as pl

STAGE = "trace-flags"
MOST_THREADS = 8
BATCH_CHARACTERS, BATCH_TEXTS = 2_000_000, 2_000
_KINDS = {
    "doubt_per_1000_words": pa.float64(),
    "unclosed_fence": pa.bool_(),
    "unclosed_thought": pa.bool_(),
    "ends_mid_sentence": pa.bool_(),
}
TRACE_FLAGS = pa.schema(
    [
        (
            "flag_key",
            pa.string(),
        ),  # hash(candidate_id, thresholds, the code that measures): lets a refresh reuse the row
        ("candidate_id", pa.string()),
        (
            "trace_flags",
            pa.list_(pa.string()),
        ),  # those of tasks.curation.quality.FLAGS that are raised
        *(
            (name, _KINDS.get(name, pa.float64() if name.endswith("share") else pa.int64()))
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
    keys = {stable_hash([name, conditions]): name for name in wanted["candidate_id"]}
    snapshot.recover(TRACE_FLAGS)
    there = snapshot.keys("flag_key")
    missing = [key for key in keys if key not in there]
    snapshot.append(
        known_rows(
            snapshot.root, STAGE, "flag_key", missing, TRACE_FLAGS, exclude=snapshot.fingerprint
        ),
        TRACE_FLAGS,
    )
    done = snapshot.index(["candidate_id"])
    left = wanted.join(done, on="candidate_id", how="anti", maintain_order="left")
    count = wanted.height - left.height
    texts = candidates.open().rows_of(left, ["candidate_id", "reasoning"])
    key_of = {name: key for key, name in keys.items()}
    with (
        closing(
            flagged(((row["candidate_id"], row["reasoning"]) for row in texts), config)
        ) as batches,
        snapshot.journal(TRACE_FLAGS) as add,
    ):
        for rows in batches:
            for row in rows.to_dicts():
                add(row | {"flag_key": key_of[row["candidate_id"]]})
            count += rows.height
            report(STAGE, count, wanted.height, "")
    counts = counted(snapshot.read(columns=["candidate_id", "trace_flags"], unique="candidate_id"))
    upstream = [verdicts.fingerprint, candidates.fingerprint]
    return snapshot.publish(
        config=config.identity, upstream=upstream, rows=wanted.height, extra={"flag_counts": counts}
    ).ref


def correct_among(verdicts: Snapshot, candidates: Snapshot) -> pl.DataFrame:
    """candidate_id and place of the candidates that a verdict calls correct, part by part."""
    import polars as pl

    judged = verdicts.read(columns=["candidate_id", "status"], unique="candidate_id")
    places = candidates.index(["candidate_id"]).unique(
        "candidate_id", keep="first", maintain_order=True
    )
    if judged.is_empty():
        return places.clear()
    return places.join(
        judged.filter(pl.col("status") == "correct"),
        on="candidate_id",
        how="semi",
        maintain_order="left",
    )


def flagged(
    texts: Iterator[tuple[str, str | None]], config: QualityConfig
) -> Iterator[pl.DataFrame]:
    """candidate_id, `trace_flags` and MEASURES of traces (id, text), a batch at a time, in no
    particular order; several threads measure."""
    threads = max(
        1,
        min(
            MOST_THREADS,
            (
                len(os.sched_getaffinity(0))
                if hasattr(os, "sched_getaffinity")
                else os.cpu_count() or 1
            ),
        ),
    )
    batches = _batches(texts)
    pool = ThreadPoolExecutor(threads)
    try:
        running: set[Future[pl.DataFrame]] = set()
        for batch in batches:
            running.add(pool.submit(_measured, batch, config))
            if len(running) > threads:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        for future in running:
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(texts: Iterator[tuple[str, str | None]]) -> Iterator[list[tuple[str, str]]]:
    batch: list[tuple[str, str]] = []
    characters = 0
    for name, text in texts:
        batch.append((name, text or ""))
        characters += len(text or "")
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_TEXTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _measured(batch: list[tuple[str, str]], config: QualityConfig) -> pl.DataFrame:
    import polars as pl

    frame = quality([text for _, text in batch], config)
    raised = (
        pl.concat_list(pl.when(name).then(pl.lit(name)) for name in FLAGS)
        .list.drop_nulls()
        .alias("trace_flags")
    )
    return frame.select(
        pl.Series("candidate_id", [name for name, _ in batch], dtype=pl.String), raised, *MEASURES
    )


def counted(rows: pl.DataFrame) -> dict[str, int]:
    """How many rows have each flag, in the order of FLAGS; 0 is said too."""
    found = (
        Counter(rows["trace_flags"].list.explode(empty_as_null=False).drop_nulls().to_list())
        if rows.height
        else Counter()
    )
    return {name: found[name] for name in FLAGS}
