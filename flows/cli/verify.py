"""`concur verify` and `concur verify-batch`: one candidate, or a table of them."""

from __future__ import annotations

import sys
from typing import Any

import click

from flows.cli.common import LANGUAGES, command, emit, json_option, set_option


@command()
@click.argument("task", type=click.Path(dir_okay=False))
@click.argument("candidate", type=click.Path(dir_okay=False))
@click.option(
    "--language",
    type=click.Choice(LANGUAGES),
    default="cpp",
    show_default=True,
    help="What the kernel is written in; cuda and triton need a GPU.",
)
@click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON object, the Verdict.")
def verify(task: str, candidate: str, language: str, as_json: bool) -> None:
    """Verify CANDIDATE (a module with ModelNew) against TASK (a module with Model)."""
    from kernels_eval.__main__ import run

    sys.exit(run(task, candidate, language, as_json))


@command("verify-batch")
@click.argument("candidates")
@click.option(
    "--tasks",
    required=True,
    metavar="TASKS",
    help="Tasks: a Parquet file, a folder or glob of them, or task files.",
)
@click.option(
    "--out",
    required=True,
    metavar="DIR",
    help="Where verdicts.parquet, summary.json and the snapshots go.",
)
@click.option(
    "--language",
    type=click.Choice(LANGUAGES),
    default=None,
    help="Verify these only.  [default: the table's language, else cpp]",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=None,
    help="Devices used at once.  [default: every GPU, or half of the cores]",
)
@click.option(
    "--builders",
    type=click.IntRange(min=1),
    default=None,
    help="Build workers.  [default: the other cores]",
)
@click.option(
    "--address",
    default=None,
    metavar="ADDRESS",
    help="A Ray cluster: auto or HOST:PORT.  [default: start one here]",
)
@set_option("Override a key of the protocol, such as timing.max_s=1.0.")
@json_option("the summary")
def verify_batch(
    candidates: str, overrides: tuple[str, ...], as_json: bool, language: str | None, **options: Any
) -> None:
    """Verify a table of CANDIDATES (Parquet: task_id and code or response) against their tasks.

    Rerun the same command to resume one that was stopped.
    """
    from flows.config import load_protocol
    from kernels_eval.records import Language
    from tasks.verification.batch import print_summary, verify_batch

    data = verify_batch(
        candidates,
        language=Language(language) if language else None,
        protocol=load_protocol(overrides),
        **options,
    )
    emit(data, as_json, print_summary)
