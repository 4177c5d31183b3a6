"""Prefect's view of synthesis."""

from __future__ import annotations

from kernels_eval.records import Language
from tasks.policy import rows_of, stage_task
from tasks.store.snapshot import SnapshotRef
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.stage import planned, run


def _synthesise_candidates(
    tasks: SnapshotRef, config: SynthesisConfig, language: Language, **_: object
) -> str:
    kernels = "kernel" if config.samples_per_task == 1 else "kernels"
    return (
        f"ask {config.model or 'the ' + config.sampler + ' responses'} for"
        f" {config.samples_per_task} {language} {kernels} for each of {rows_of(tasks)} tasks"
    )


synthesise = stage_task(run, planned, "synthesise candidates", _synthesise_candidates)
refine = synthesise.with_options(
    name="refine candidates", task_run_name="refine {language} candidates, turn {turn}"
)
