"""Verdicts in, training set out. Thin: the rules are pure functions in `strategies`."""

from __future__ import annotations

from typing import Any

import polars as pl

from kernels_eval.errors import UsageError
from tasks.curation.flags import counted
from tasks.curation.pool import without_flags
from tasks.curation.strategies import CurationConfig, curate
from tasks.curation.tables import curated_rows, deciding, joined_on_candidate, texts_of
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
    `operators_from` counts the correct samples by whose word was taken. `flags` say what is wrong
    with a trace; the manifest's `trace_flags` counts them (`flag_counts`).
    """
    snapshot = planned(verdicts, candidates, tasks, config, workloads, flags)
    if snapshot.finished:
        return snapshot.ref
    frame = deciding(
        verdicts.open(),
        candidates.open(),
        workloads.open() if workloads else None,
        flags.open() if flags else None,
    )
    taken = curate(frame, config)
    if taken.is_empty():
        raise UsageError(*nothing_taken(frame, config))
    rows = curated_rows(taken, texts_of(candidates.open(), taken), named_tasks(tasks.open()))
    left = rows.filter(~pl.col("candidate_id").is_in(list(snapshot.keys("candidate_id"))))
    snapshot.append(left.iter_rows(named=True), CURATED)
    counts = dict(sorted(rows["criterion"].value_counts().iter_rows()))
    report(
        STAGE,
        rows.height,
        rows.height,
        ", ".join(f"{name} {count}" for name, count in counts.items()),
    )
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


def named_tasks(tasks: Snapshot) -> pl.DataFrame:
    """task_id, task_name, task_code, entry_point: what a curated row says of its task."""
    rows = tasks.read(columns=["task_id", "name", "code", "entry_point"], unique="task_id")
    return rows.select(
        "task_id",
        pl.col("name").alias("task_name"),
        pl.col("code").alias("task_code"),
        "entry_point",
    )


def nothing_taken(frame: pl.DataFrame, config: CurationConfig) -> tuple[str, str]:
    """The error of an empty training set, and its hint."""
    correct = frame.filter(pl.col("status") == "correct")
    message = f"curation took none of {frame.height} candidates ({correct.height} correct)"
    if config.exclude_flags and correct.height and correct.filter(without_flags(config)).is_empty():
        return message, "every correct one has a trace flag of exclude_flags: exclude fewer"
    if (
        not config.later_turns
        and "turn" in frame.columns
        and correct.height
        and (correct["turn"].fill_null(1) > 1).all()
    ):
        return (
            message,
            "all correct ones answer follow-ups: curation.later_turns=true takes those too",
        )
    return message, "lower curation.min_speedup or verify more candidates"
