"""`concur verify` and `concur verify-batch`: one candidate, or a table of them."""

from __future__ import annotations

import sys
from typing import Any

import click

from flows.cli.common import LANGUAGES, command, emit, json_option, print_table, set_option


@command()
@click.argument("task", type=click.Path(dir_okay=False))
@click.argument("candidate", type=click.Path(dir_okay=False))
@click.option(
    "--language",
    type=click.Choice(LANGUAGES),
    default="cpp",
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
    help="Verify these only.  [default: the table's language, else cpp]",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Devices used at once.  [default: every GPU, or half of the cores]",
)
@click.option(
    "--builders",
    type=click.IntRange(min=1),
    help="Build workers.  [default: the other cores]",
)
@click.option(
    "--address",
    metavar="ADDRESS",
    help="A Ray cluster: auto or HOST:PORT.  [default: start one here]",
)
@set_option("Override a key of the protocol, such as timing.max_s=1.0.")
@json_option("the summary")
def verify_batch(
    candidates: str,
    tasks: str,
    out: str,
    language: str | None,
    workers: int | None,
    builders: int | None,
    address: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Verify a table of CANDIDATES (Parquet: task_id and code or response) against their tasks.

    Rerun the same command to resume one that was stopped.
    """
    from flows.config import load_protocol
    from kernels_eval.records import Language
    from tasks.synthesis.tables import CandidateTable
    from tasks.verification.batch import verify_batch
    from tasks.verification.config import VerificationConfig

    config = VerificationConfig(
        eval=load_protocol(overrides), workers=workers, builders=builders, ray_address=address
    )
    table = CandidateTable(candidates)
    data = verify_batch(table, tasks, out, config, Language(language) if language else None)
    emit(data, as_json, print_summary)


def print_summary(data: dict[str, Any]) -> None:
    """Print the summary of a batch. Text of candidates and devices is sanitised."""
    from tasks.sources.files import shown

    click.echo(
        f"{data['candidates']:,} candidates of {data['tasks']:,} tasks ({data['language']},"
        f" {shown(data['device'])})"
    )
    outcomes = [
        (status if number == 0 else "", reason, f"{count:,}", f"{count / data['candidates']:.1%}")
        for status in data["statuses"]
        for number, (reason, count) in enumerate(data["reasons"][status].items())
    ]
    numbers = ("candidates", "share", "sum", "mean")
    print_table("", ("status", "reason", "candidates", "share"), outcomes, right=numbers)
    if quantiles := data["speedup"]["quantiles"]:
        timed, above = data["speedup"]["timed"], data["speedup"]["above_1"]
        click.echo(f"speedup of {timed:,} correct candidates ({above:,} above 1), quantiles")
        names = [f"{float(share):.0%}" for share in quantiles]
        print_table("", names, [[f"{value:.3g}" for value in quantiles.values()]], right=names)
    seconds = [
        (name, f"{spent['candidates']:,}", f"{spent['sum']:,.1f}", f"{spent['mean']:.3f}")
        for name, spent in data["seconds"].items()
        if spent["candidates"]
    ]
    if seconds:
        click.echo("seconds")
        print_table("", ("phase", "candidates", "sum", "mean"), seconds, right=numbers)
    tiers = data["builds"]["tiers"]
    counts = ", ".join(f"{shown(tier)} {count:,}" for tier, count in tiers.items())
    cached = f"{sum(tiers.values()):,} ({counts}); {data['builds']['cached']:,} from the cache"
    click.echo(f"builds: {cached if tiers else 'none'}")
    for line in data["quarantined"]:
        click.echo(f"a device was quarantined: {shown(line)}")
    this_run = data["this_run"]
    new = "nothing was new, everything was served from the finished snapshot"
    if this_run["by_workers"]:
        new = (
            f"{this_run['by_workers']:,} verified now, {this_run['without_worker']:,} verified"
            " before or without code"
        )
    click.echo(f"done in {this_run['seconds']:.0f} s: {new}")
    for name in ("verdicts", "summary"):
        click.echo(f"{name + ':':<10} {data[name]}")  # plain lines: a wrapped path cannot be copied
    click.echo(f"{'snapshot:':<10} {data['snapshots']['verdicts']}")
