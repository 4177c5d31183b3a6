"""Tasks in, training tasks out, without those the benchmark contains or another task repeats. The
manifest has the level and match of removed ones."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from kernels_eval.errors import UsageError
from tasks.decontamination.config import DecontaminationConfig, DeduplicationConfig
from tasks.decontamination.decontamination import decontaminate
from tasks.decontamination.deduplication import deduplicate_tasks
from tasks.progress import report
from tasks.store import Snapshot, SnapshotRef
from tasks.tables import TASKS
from tasks.versions import DECONTAMINATION_VERSION

STAGE = "training-tasks"


def planned(
    tasks: SnapshotRef,
    benchmark: SnapshotRef | None,
    decontamination: DecontaminationConfig,
    deduplication: DeduplicationConfig,
    workloads: SnapshotRef | None = None,
    benchmark_workloads: SnapshotRef | None = None,
) -> Snapshot:
    config = [decontamination.model_dump(mode="json"), deduplication.model_dump(mode="json")]
    upstream = [tasks, benchmark, workloads, benchmark_workloads]
    return Snapshot.planned(STAGE, config, upstream, DECONTAMINATION_VERSION)


def run(
    tasks: SnapshotRef,
    benchmark: SnapshotRef | None,
    decontamination: DecontaminationConfig,
    deduplication: DeduplicationConfig,
    workloads: SnapshotRef | None = None,
    benchmark_workloads: SnapshotRef | None = None,
) -> SnapshotRef:
    """A finished snapshot of tasks.tables.TASKS.

    `workloads` and `benchmark_workloads` belong to the two sets; without them only texts are
    compared. `benchmark` may be None where decontamination is off. Raises UsageError where no task
    is left.
    """
    snapshot = planned(
        tasks, benchmark, decontamination, deduplication, workloads, benchmark_workloads
    )
    if snapshot.finished:
        return snapshot.ref
    frame = with_graphs(tasks, workloads)
    known = with_graphs(benchmark, benchmark_workloads) if benchmark else frame.clear()
    clean = decontaminate(frame, known, decontamination)
    left = frame.filter(pl.col("task_id").is_in(clean.kept))
    single = deduplicate_tasks(left, deduplication)
    kept = left.filter(pl.col("task_id").is_in(single.kept)).drop("graph")
    if kept.is_empty():
        raise UsageError(
            f"all {frame.height} training tasks are known to the benchmark"
            f" ({_listed(clean.counts)})",
            "train on other tasks (tasks.source, tasks.location), or set"
            " decontamination.enabled=false to keep them",
        )
    snapshot.append(kept.iter_rows(named=True), TASKS, key="task_id")
    counts = {
        "kept": kept.height,
        "known to the benchmark": clean.removed.height,
        "repeated": single.removed.height,
    }
    report(STAGE, frame.height, frame.height, _listed(counts))
    return snapshot.publish(
        config={
            "decontamination": decontamination.model_dump(mode="json"),
            "deduplication": deduplication.model_dump(mode="json"),
        },
        rows=kept.height,
        extra={
            "status_counts": counts,
            "decontamination": {
                "counts": clean.counts,
                "removed": clean.removed.to_dicts(),
                "untraced": list(clean.untraced),
            },
            "deduplication": {"counts": single.counts, "removed": single.removed.to_dicts()},
            "report": clean.markdown() if decontamination.enabled else "Decontamination was off.\n",
        },
    ).ref


def with_graphs(tasks: SnapshotRef, workloads: SnapshotRef | None) -> pl.DataFrame:
    frame = tasks.open().read(unique="task_id")
    if workloads is None:
        return frame.with_columns(graph=pl.lit(None))
    graphs = workloads.open().read(columns=["task_id", "graph"], unique="task_id")
    return frame.join(graphs, on="task_id", how="left", maintain_order="left")


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)
