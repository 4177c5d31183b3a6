"""Prefect's view of the analysis."""

from __future__ import annotations

from prefect import task

from tasks.analysis import stage
from tasks.analysis.config import ObservationConfig
from tasks.policy import rows_of, sentence, stage_options
from tasks.store.snapshot import SnapshotRef


def _analyse_the_samples(verdicts: SnapshotRef, **_: object) -> str:
    return f"analyse the reasoning length of {rows_of(verdicts)} samples"


@task(
    name="analyse the samples",
    task_run_name=sentence(_analyse_the_samples),
    **stage_options(stage.planned),
)
def analyse(
    verdicts: SnapshotRef, candidates: SnapshotRef, config: ObservationConfig
) -> SnapshotRef:
    return stage.run(verdicts, candidates, config)
