"""Prefect's view of synthesis."""

from __future__ import annotations

from pathlib import Path

from prefect import task

from kernels_eval.records import Language
from tasks.policy import rows_of, sentence, stage_options
from tasks.store.snapshot import SnapshotRef
from tasks.synthesis import stage
from tasks.synthesis.config import SynthesisConfig


def _synthesise_candidates(
    tasks: SnapshotRef, config: SynthesisConfig, language: Language, **_: object
) -> str:
    samples = f"{config.samples_per_task} {language} " + (
        "kernel" if config.samples_per_task == 1 else "kernels"
    )
    return (
        f"ask {config.model or 'the ' + config.sampler + ' responses'} for {samples} for each of"
        f" {rows_of(tasks)} tasks"
    )


@task(
    name="synthesise candidates",
    task_run_name=sentence(_synthesise_candidates),
    **stage_options(stage.planned),
)
def synthesise(
    tasks: SnapshotRef, config: SynthesisConfig, language: Language, adapter: Path | None = None
) -> SnapshotRef:
    return stage.run(tasks, config, language, adapter)


@task(
    name="refine candidates",
    task_run_name="refine {language} candidates, turn {turn}",
    **stage_options(stage.planned_turn),
)
def refine(
    tasks: SnapshotRef,
    candidates: SnapshotRef,
    verdicts: SnapshotRef,
    config: SynthesisConfig,
    language: Language,
    turn: int,
    adapter: Path | None = None,
) -> SnapshotRef:
    return stage.refine(tasks, candidates, verdicts, config, language, turn, adapter)
