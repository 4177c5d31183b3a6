"""`concur up`, `concur status`, `concur down` and `concur env`: the servers that a line needs to
run every night, on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import click

PARTS = ("prefect", "mlflow", "ray", "worker")
ROOT = click.option(
    "--root", default=".concur", show_default=True, help="Where snapshots, databases and logs are."
)


def _port(name: str, default: str, of: str) -> Callable[[Any], Any]:
    return click.option(
        f"--{name}-port",
        type=int,
        default=None,
        metavar="PORT",
        help=f"Of {of}.  [default: {default}]",
    )


@click.command()
@ROOT
@click.option(
    "--config",
    "file",
    default=None,
    metavar="FILE",
    help="A YAML file with these settings; options win over it.",
)
@click.option(
    "--host",
    default=None,
    metavar="ADDRESS",
    help="Where Prefect and MLflow listen.  [default: 127.0.0.1]",
)
@click.option(
    "--public-host",
    default=None,
    metavar="NAME",
    help="How browsers elsewhere call this machine, with --host.",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="A further name that MLflow answers to, with --host.",
)
@_port("prefect", "4200", "the Prefect server")
@_port("worker", "4280", "the worker's health, on loopback")
@_port("mlflow", "5000", "the MLflow server")
@_port("ray", "6379", "the Ray head, on loopback")
@_port("ray-client", "10001", "Ray Client, on loopback")
@_port("ray-dashboard", "no dashboard", "Ray's dashboard, on loopback")
@click.option(
    "--without", multiple=True, type=click.Choice(PARTS), help="Do not start this part. Repeat."
)
@click.option(
    "--prefect-database",
    default=None,
    metavar="URL",
    help="PostgreSQL; with a password: $PREFECT_SERVER_DATABASE_CONNECTION_URL.",
)
@click.option(
    "--mlflow-database",
    default=None,
    metavar="URL",
    help="PostgreSQL; with a password: $MLFLOW_BACKEND_STORE_URI.",
)
@click.option(
    "--gpu-limit",
    type=click.IntRange(min=1),
    default=None,
    help="Runs at once in queue gpu.  [default: the number of GPUs, or 1]",
)
@click.option(
    "--cpu-limit",
    type=click.IntRange(min=1),
    default=None,
    help="Runs at once in queue cpu.  [default: half of the cores, or 2]",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1),
    default=300.0,
    show_default=True,
    help="Seconds until all is healthy.",
)
@click.option(
    "--foreground",
    is_flag=True,
    help="Stay, and stop everything on SIGTERM or Ctrl-C: for systemd and containers.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the status as one JSON object.")
def up(
    root: str, file: str | None, timeout_s: float, foreground: bool, as_json: bool, **options: Any
) -> None:
    """Start Prefect, a worker, MLflow and Ray on this machine, and keep them alive.

    A second time it starts what is missing. Loopback only; --host elsewhere needs passwords in
    PREFECT_SERVER_API_AUTH_STRING (user:password) and MLFLOW_AUTH_ADMIN_PASSWORD.
    """
    from flows.cli.main import _guarded
    from flows.ops import control

    given = {name: value for name, value in options.items() if value is not None and value != ()}
    tell = _quiet if as_json else _tell
    data = _guarded(
        lambda: control.up(
            root, given, file=file, timeout_s=timeout_s, foreground=foreground, tell=tell
        )
    )
    if foreground:
        return
    if as_json:
        click.echo(json.dumps(data))
        return
    _print(data)
    click.echo(f'for this shell:  eval "$(concur env --root {root})"')


@click.command()
@ROOT
@click.option("--json", "as_json", is_flag=True, help="Print the status as one JSON object.")
def status(root: str, as_json: bool) -> None:
    """Show each part of the stack as it answers now. Exit status 0 only if all of it is healthy."""
    from flows.cli.main import _guarded
    from flows.ops import control

    data = _guarded(lambda: control.status(root))
    if as_json:
        click.echo(json.dumps(data))
    else:
        _print(data)
    sys.exit(0 if data["healthy"] else 1)


@click.command()
@ROOT
@click.option("--json", "as_json", is_flag=True, help="Print what was stopped as one JSON object.")
def down(root: str, as_json: bool) -> None:
    """Stop the stack and every run below it, within 70 s, usually 10. Databases, snapshots and logs
    stay."""
    from flows.cli.main import _guarded
    from flows.ops import control

    data = _guarded(lambda: control.down(root, _quiet if as_json else _tell))
    if as_json:
        click.echo(json.dumps(data))
    else:
        click.echo(
            f"stopped in {data['seconds']:.1f} s"
            if data.get("processes")
            else f"no stack runs for {root}"
        )


@click.command()
@ROOT
def env(root: str) -> None:
    """Print the lines that point a shell at the stack: eval "$(concur env)"."""
    from flows.cli.main import _guarded
    from flows.ops import control

    click.echo("\n".join(_guarded(lambda: control.export_lines(root))))


def _tell(line: str) -> None:
    click.echo(line, err=True)


def _quiet(line: str) -> None:
    pass


def _print(data: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    if not data["parts"]:
        click.echo(f"no stack runs for {data['root']}")
        return
    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table(title=f"concur stack of {data['root']}")
    for column in ("part", "health", "pid", "processes", "restarts", "up", "at", "log"):
        table.add_column(column, overflow="fold")
    for row in data["parts"]:
        health = row["health"] + (f": {row['reason']}" if row["reason"] else "")
        table.add_row(
            row["part"],
            escape(health),
            str(row["pid"] or "-"),
            str(row["processes"]),
            str(row["restarts"]),
            _duration(row["uptime_s"]),
            row["url"],
            escape(row["log"]),
        )
    console.print(table)
    if data["supervisor"] is None:
        click.echo("the supervisor does not run: `concur up` starts one that takes over what runs")


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes} min"
        if hours
        else f"{minutes} min {rest} s"
        if minutes
        else f"{rest} s"
    )
