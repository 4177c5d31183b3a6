"""Verdicts in, training set out. Thin: the rules are pure functions in `strategies`."""

from __future__ import annotations

from typing import Any

import polars as pl

from kernels_eval.errors import UsageError
from tasks.curation.config import CurationConfig
from tasks.curation.flags import counted
from tasks.curation.pool import without_flags
from tasks.curation.strategies import curate
from tasks.curation.tables import (
    curated_rows,
    deciding,
    joined_on_candidate,
    named_tasks,
    texts_of,
)
from tasks.progress import report
from tasks.store import Snapshot, SnapshotRef, fingerprint
from tasks.tables import CURATED
from tasks.versions import CURATION_VERSION

STAGE = "curation"


def joined(verdicts: SnapshotRef, candidates: SnapshotRef) -> pl.DataFrame:
    """Verdicts with their candidates, one row a candidate, texts and all: what scores and reports
    read."""
    return joined_on_candidate(
        verdicts.open().read(unique="candidate_id"), candidates.open().read(unique="candidate_id")
    )


def planned(
    verdicts: SnapshotRef,
    candidates: SnapshotRef,
    tasks: SnapshotRef,
    config: CurationConfig,
    workloads: SnapshotRef | None = None,
    flags: SnapshotRef | None = None,
) -> Snapshot:
    """The snapshot that `run` with the same arguments fills."""
    upstream = _upstream(verdicts, candidates, tasks, workloads, flags)
    key = fingerprint(STAGE, config.identity, upstream, CURATION_VERSION)
    return Snapshot(verdicts.root, STAGE, key)


def run(
    verdicts: SnapshotRef,
    candidates: SnapshotRef,
    tasks: SnapshotRef,
    config: CurationConfig,
    workloads: SnapshotRef | None = None,
    flags: SnapshotRef | None = None,
) -> SnapshotRef:
    """A finished snapshot of tasks.tables.CURATED, each row labelled with the criterion that took
    it.

    `workloads` name the operators of tasks whose verdicts name none; the manifest's
    `operators_from` counts the correct samples by where those are from. `flags` are the flaws of
    the traces; the manifest's `trace_flags` counts them (`flag_counts`). Raises UsageError where
    nothing is taken, and as `curate` does.
    """
    snapshot = planned(verdicts, candidates, tasks, config, workloads, flags)
    if snapshot.finished:
        return snapshot.ref
    others = (ref.open() if ref else None for ref in (workloads, flags))
    frame = deciding(verdicts.open(), candidates.open(), *others)
    taken = curate(frame, config)
    if taken.is_empty():
        raise nothing_taken(frame, config)
    rows = curated_rows(taken, texts_of(candidates.open(), taken), named_tasks(tasks.open()))
    left = rows.filter(~pl.col("candidate_id").is_in(list(snapshot.keys("candidate_id"))))
    snapshot.append(left.iter_rows(named=True), CURATED)
    counts = dict(sorted(rows["criterion"].value_counts().iter_rows()))
    summary = ", ".join(f"{name} {count}" for name, count in counts.items())
    report(STAGE, rows.height, rows.height, summary)
    return snapshot.publish(
        config=config,
        upstream=_upstream(verdicts, candidates, tasks, workloads, flags),
        rows=rows.height,
        extra={
            "criterion_counts": counts,
            "operators_from": operators_from(frame),
            "trace_flags": flag_counts(frame, taken, config),
        },
    ).ref


def _upstream(*refs: SnapshotRef | None) -> list[str]:
    return [ref.fingerprint for ref in refs if ref]


def flag_counts(
    frame: pl.DataFrame, taken: pl.DataFrame, config: CurationConfig
) -> dict[str, Any] | None:
    """How many `correct` and how many `taken` samples have each flag of their trace, and how many
    correct ones were `left_out` for one.

    None where no trace was measured. With moved reasoning, `taken` is of the samples' own.
    """
    if "trace_flags" not in frame.columns:
        return None
    correct = frame.filter(pl.col("status") == "correct")
    out = correct.height - correct.filter(without_flags(config)).height
    return {"correct": counted(correct), "taken": counted(taken), "left_out": out}


def operators_from(frame: pl.DataFrame) -> dict[str, int]:
    """How many correct samples have their task's operators from a verdict, from its workload, or
    from nowhere ("unknown")."""
    found = frame.filter(pl.col("status") == "correct")["operators_from"].fill_null("unknown")
    return dict(sorted(found.value_counts().iter_rows()))


def nothing_taken(frame: pl.DataFrame, config: CurationConfig) -> UsageError:
    """The error of an empty training set, with the likeliest fix."""
    correct = frame.filter(pl.col("status") == "correct")
    fix = "lower curation.min_speedup or verify more candidates"
    if correct.height:
        if correct.filter(without_flags(config)).is_empty():
            fix = "every correct one has a trace flag of exclude_flags: exclude fewer"
        elif _only_follow_ups(correct) and not config.later_turns:
            fix = "all correct ones answer follow-ups: curation.later_turns=true takes those too"
    return UsageError(
        f"curation took none of {frame.height} candidates ({correct.height} correct)", fix
    )


def _only_follow_ups(correct: pl.DataFrame) -> bool:
    return "turn" in correct.columns and bool((correct["turn"].fill_null(1) > 1).all())
