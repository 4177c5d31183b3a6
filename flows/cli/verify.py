"""`concur verify` for one candidate, `concur verify-batch` for many."""

from __future__ import annotations

import sys

import click

from flows.cli.common import command, emit


@command
@click.argument("task", type=click.Path(dir_okay=False))
@click.argument("candidate", type=click.Path(dir_okay=False))
def verify(
    task: str,
    candidate: str,
    language: str | None,
    quick: bool,
    progress: bool,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Verify one kernel: CANDIDATE (a file with ModelNew) against TASK (a file with Model)."""
    from kernels_eval.__main__ import QUICK, run

    config = QUICK if quick else None
    if overrides:
        from flows.config import load_protocol

        config = load_protocol(overrides, config)
    sys.exit(run(task, candidate, language, as_json, config=config, progress=progress))


@command
@click.argument("candidates")
def verify_batch(
    candidates: str,
    tasks: str,
    out: str,
    language: str | None,
    model: str | None,
    quick: bool,
    overrides: tuple[str, ...],
    as_json: bool,
    **options: object,
) -> None:
    """Verify CANDIDATES against their tasks: a table (Parquet, JSON lines, CSV), a folder of .py
    files, a run of KernelBench, or a data set on the hub.

    If the run is stopped, rerun the same command to resume it.
    """
    from flows.config import load_protocol
    from kernels_eval.__main__ import QUICK
    from kernels_eval.records import Language
    from tasks.synthesis.tables import CandidateTable
    from tasks.verification.batch import verify_batch
    from tasks.verification.config import VerificationConfig

    protocol = load_protocol(overrides, QUICK if quick else None)
    config = VerificationConfig(eval=protocol, **options)
    table = CandidateTable(candidates, model)
    data = verify_batch(table, tasks, out, config, Language(language) if language else None)
    emit(data, as_json, "verify-batch")
