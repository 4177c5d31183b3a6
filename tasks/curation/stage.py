"""Verdicts in, training set out. Thin: the rules are pure functions in `strategies`."""

from __future__ import annotations

import polars as pl

from kernels_eval.errors import UsageError
from tasks.curation.operators import operator_kind
from tasks.curation.strategies import CurationConfig, curate
from tasks.progress import report
from tasks.schemas import CURATED
from tasks.store import Snapshot, SnapshotRef, code_version, fingerprint

STAGE = "curation"


def joined(verdicts: SnapshotRef, candidates: SnapshotRef) -> pl.DataFrame:
    """Verdicts with their candidates, one row a candidate: what the strategies and the scores read."""
    left = verdicts.open().read(unique="candidate_id")
    right = candidates.open().read(unique="candidate_id")
    repeated = [name for name in right.columns if name in left.columns and name != "candidate_id"]
    return left.join(right.drop(repeated), on="candidate_id", how="inner", maintain_order="left")


def planned(verdicts: SnapshotRef, candidates: SnapshotRef, tasks: SnapshotRef, config: CurationConfig) -> Snapshot:
    """The snapshot that `run` with the same arguments fills."""
    upstream = [verdicts.fingerprint, candidates.fingerprint, tasks.fingerprint]
    return Snapshot(verdicts.root, STAGE, fingerprint(STAGE, config, upstream, code_version("tasks.curation")))


def run(verdicts: SnapshotRef, candidates: SnapshotRef, tasks: SnapshotRef, config: CurationConfig) -> SnapshotRef:
    """A finished snapshot of tasks.schemas.CURATED, each row labelled with the criterion that took it."""
    snapshot = planned(verdicts, candidates, tasks, config)
    if snapshot.finished:
        return snapshot.ref
    frame = joined(verdicts, candidates)
    taken = curate(frame, config)
    if taken.is_empty():
        correct = frame.filter(pl.col("status") == "correct").height
        raise UsageError(
            f"curation took none of {frame.height} candidates ({correct} correct)", "lower curation.min_speedup or verify more candidates"
        )
    named = (
        tasks.open()
        .read(unique="task_id")
        .select("task_id", pl.col("name").alias("task_name"), pl.col("code").alias("task_code"), "entry_point")
    )
    rows = taken.join(named, on="task_id", how="left", maintain_order="left")
    done = snapshot.keys("candidate_id")
    snapshot.append([_row(row) for row in rows.iter_rows(named=True) if row["candidate_id"] not in done], CURATED)
    counts = dict(sorted(rows["criterion"].value_counts().iter_rows()))
    report(STAGE, rows.height, rows.height, ", ".join(f"{name} {count}" for name, count in counts.items()))
    return snapshot.publish(
        config=config,
        upstream=[verdicts.fingerprint, candidates.fingerprint, tasks.fingerprint],
        rows=rows.height,
        extra={"criterion_counts": counts},
    ).ref


def _row(row: dict) -> dict:
    timing = row["timing"] or {}
    return {name: row.get(name) for name in CURATED.names} | {
        "speedup": timing.get("speedup"),
        "speedup_lower": timing.get("speedup_lower"),
        "operator_kind": operator_kind(row["reference_operators"] or []),
    }
