"""Prefect's view of curation."""

from __future__ import annotations

from kernels_eval.records import Status
from tasks.curation import flags, stage
from tasks.policy import rows_of, stage_task
from tasks.store.snapshot import SnapshotRef


def _flag_traces(verdicts: SnapshotRef, **_: object) -> str:
    correct = (verdicts.open().manifest.get("status_counts") or {}).get(Status.CORRECT, 0)
    return f"look for flaws in the reasoning of {correct:,} correct samples"


flag_traces = stage_task(flags.run, flags.planned, "flag traces", _flag_traces)
curate = stage_task(
    stage.run,
    stage.planned,
    "curate the training set",
    lambda samples, config, **_: (
        f"curate a training set of {rows_of(samples.verdicts)} verdicts"
        f" by the strategy {config.strategy}"
    ),
)
