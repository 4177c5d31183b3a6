"""Prefect's view of curation."""

from __future__ import annotations

from prefect import task

from tasks.curation import flags, stage
from tasks.curation.config import CurationConfig, QualityConfig
from tasks.curation.kernels import EqualKernels, same_text
from tasks.policy import rows_of, sentence, stage_options
from tasks.store.snapshot import SnapshotRef


def _flag_traces(verdicts: SnapshotRef, **_: object) -> str:
    correct = (verdicts.open().manifest.get("status_counts") or {}).get("correct", 0)
    return f"look for flaws in the reasoning of {correct:,} correct samples"


def _curate_the_training_set(verdicts: SnapshotRef, config: CurationConfig, **_: object) -> str:
    return (
        f"curate a training set of {rows_of(verdicts)} verdicts by the strategy {config.strategy}"
    )


@task(name="flag traces", task_run_name=sentence(_flag_traces), **stage_options(flags.planned))
def flag_traces(
    verdicts: SnapshotRef, candidates: SnapshotRef, config: QualityConfig
) -> SnapshotRef:
    return flags.run(verdicts, candidates, config)


@task(
    name="curate the training set",
    task_run_name=sentence(_curate_the_training_set),
    **stage_options(stage.planned),
)
def curate(
    verdicts: SnapshotRef,
    candidates: SnapshotRef,
    tasks: SnapshotRef,
    config: CurationConfig,
    workloads: SnapshotRef | None = None,
    flags: SnapshotRef | None = None,
    equal: EqualKernels | None = same_text,
    profiles: SnapshotRef | None = None,
) -> SnapshotRef:
    return stage.run(verdicts, candidates, tasks, config, workloads, flags, equal, profiles)
