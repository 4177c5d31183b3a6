"""The `concur` command. Answers --help without loading anything heavy: every command imports what it needs when it runs.

Exit status: 0 done; 1 the run or the machine failed; 2 the input cannot be used; 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kernels_eval.errors import DeviceError, EvalError, UsageError

LANGUAGES = ("cpp", "cuda", "triton")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="concur")
def main() -> None:
    """Turn LLM-written GPU kernels into trustworthy training data."""


@main.command()
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


@main.command()
@click.option("--profile", default="local", show_default=True, help="Profile whose needs decide the exit status.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the profile.")
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
def doctor(profile: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show what is here, what is missing, and the line that fixes it."""
    from flows.doctor import examine, runnable

    checks = _guarded(lambda: examine(profile, overrides))
    if as_json:
        click.echo(json.dumps({"profile": profile, "runnable": runnable(checks), "checks": [check.model_dump() for check in checks]}))
    else:
        _print_checks(checks, profile, runnable(checks))
    sys.exit(0 if runnable(checks) else 1)


@main.command()
@click.option("--profile", default="local", show_default=True, help="A profile's name, or the path of a YAML file.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key, such as verification.workers=2.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object.")
@click.option("--only", type=click.Choice(["refresh"]), default=None, help="Stop after the refresh (tasks to curated set).")
def run(profile: str, overrides: tuple[str, ...], as_json: bool, only: str | None) -> None:
    """Run the line: tasks, synthesis, verification, curation, training, benchmark, tracking."""
    from flows.config import load_profile

    config = _guarded(lambda: load_profile(profile, overrides))
    _guarded(lambda: _prepare(config))
    from flows.launch import launch

    summary = _guarded(lambda: launch(config, refresh_only=only == "refresh", quiet=as_json))
    click.echo(json.dumps(summary) if as_json else "")


@main.command("verify-batch")
@click.argument("candidates")
@click.option("--tasks", required=True, metavar="TASKS", help="Tasks: a Parquet file, a folder or glob of them, or task files.")
@click.option("--out", required=True, metavar="DIR", help="Where verdicts.parquet, summary.json and the snapshots go.")
@click.option(
    "--language", type=click.Choice(LANGUAGES), default=None, help="Verify these only.  [default: the table's language, else cpp]"
)
@click.option(
    "--workers", type=click.IntRange(min=1), default=None, help="Devices used at once.  [default: every GPU, or half of the cores]"
)
@click.option("--builders", type=click.IntRange(min=1), default=None, help="Build workers.  [default: the other cores]")
@click.option("--address", default=None, metavar="ADDRESS", help="A Ray cluster: auto or HOST:PORT.  [default: start one here]")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the protocol, such as timing.max_s=1.0.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object.")
def verify_batch(candidates: str, overrides: tuple[str, ...], as_json: bool, language: str | None, **options: Any) -> None:
    """Verify a table of CANDIDATES (Parquet: task_id and code or response) against their tasks.

    The same command again goes on where it was stopped.
    """
    from kernels_eval.records import Language

    def work() -> dict[str, Any]:
        from flows.batch import verify_batch
        from flows.config import load_protocol

        protocol = load_protocol(overrides)
        return verify_batch(candidates, language=Language(language) if language else None, protocol=protocol, **options)

    data = _guarded(work)
    if as_json:
        click.echo(json.dumps(data))
        return
    from flows.batch import print_summary

    print_summary(data)


@main.command()
@click.option("--verdicts", required=True, metavar="PATH", help="A verification snapshot's directory, or a Parquet file.")
@click.option("--candidates", default=None, metavar="PATH", help="Their candidates.  [default: the verdicts hold the columns]")
@click.option("--other-verdicts", default=None, metavar="PATH", help="Verdicts of another generator on the same tasks.")
@click.option("--other-candidates", default=None, metavar="PATH", help="Their candidates.")
@click.option("--out", default="analysis", show_default=True, metavar="DIR", help="Where report.md, analysis.json and the figures go.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the permutation test and the random groups of tasks.")
@click.option("--json", "as_json", is_flag=True, help="Print the analysis as one JSON object.")
def analyze(as_json: bool, **options: Any) -> None:
    """Observations and difficulty: what reasoning length says of correctness and speedup."""

    def work() -> Any:
        from flows.analyze import analyze

        return analyze(**options)

    analysis = _guarded(work)
    click.echo(json.dumps(analysis.as_json()) if as_json else analysis.summary())


def _prepare(config: Any) -> None:
    """What must hold before anything starts: a device for the language, the cluster if one is named, and a root that can be written."""
    from kernels_eval.cluster import address_of, require_cluster
    from kernels_eval.worker import require_device

    require_device(config.language)
    if (address := address_of(config.verification.ray_address)) != "local":
        require_cluster(address)
    if "://" in config.root:
        return
    root = Path(config.root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"cannot write to root {config.root}: {error.strerror}", "choose another one with --set root=DIR, or mend its permissions"
        ) from error


def _guarded(call: Callable[[], Any]) -> Any:
    """Run a command's body; one clear line and the right exit status for what users and machines get wrong."""
    try:
        return call()
    except (UsageError, DeviceError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    except EvalError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("interrupted: what is finished is kept; the same command goes on from there", err=True)
        sys.exit(130)


def _print_checks(checks: list[Any], profile: str, fine: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"concur doctor (profile {profile})")
    for column in ("", "what", "found", "fix"):
        table.add_column(column, overflow="fold")
    for check in checks:
        mark = "ok" if check.ok else ("MISSING" if check.need == "required" else "-")
        table.add_row(mark, check.name, check.found, check.fix)
    console = Console()
    console.print(table)
    console.print(f"profile {profile} can run here" if fine else f"profile {profile} cannot run here: mend what is MISSING")


if __name__ == "__main__":
    main()
