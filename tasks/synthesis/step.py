"""Prefect's view of synthesis."""

from __future__ import annotations

from pathlib import Path

from prefect import task

from kernels_eval.records import Language
from tasks.policy import rows_of, sentence, stage_options
from tasks.store.snapshot import SnapshotRef
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.stage import Synthesis, planned


def _synthesise_candidates(
    tasks: SnapshotRef, config: SynthesisConfig, language: Language, **_: object
) -> str:
    kernels = "kernel" if config.samples_per_task == 1 else "kernels"
    return (
        f"ask {config.model or 'the ' + config.sampler + ' responses'} for"
        f" {config.samples_per_task} {language} {kernels} for each of {rows_of(tasks)} tasks"
    )


@task(
    name="synthesise candidates",
    task_run_name=sentence(_synthesise_candidates),
    **stage_options(planned),
)
def synthesise(
    tasks: SnapshotRef, config: SynthesisConfig, language: Language, adapter: Path | None = None
) -> SnapshotRef:
    return Synthesis(tasks, config, language, adapter).run()


@task(
    name="refine candidates",
    task_run_name="refine {language} candidates, turn {turn}",
    **stage_options(planned),
)
def refine(
    tasks: SnapshotRef,
    candidates: SnapshotRef,
    verdicts: SnapshotRef,
    config: SynthesisConfig,
    language: Language,
    turn: int,
    profiles: SnapshotRef | None = None,
) -> SnapshotRef:
    return Synthesis(
        tasks,
        config,
        language,
        candidates=candidates,
        verdicts=verdicts,
        profiles=profiles,
        turn=turn,
    ).run()
