"""`concur up`, `concur status`, `concur down` and `concur env`: the servers that a line needs to
run every night, on this machine."""

from __future__ import annotations

import sys
from typing import Any

import click

from flows.cli.common import Option, command, emit, json_option, print_table, root_option

NONE = "no stack runs for {}"
PARTS = ("prefect", "mlflow", "ray", "worker")
ROOT = root_option("Where snapshots, databases and logs are.")


def _port(name: str, default: str, of: str) -> Option:
    return click.option(
        f"--{name}-port",
        type=int,
        metavar="PORT",
        help=f"Port of {of}.  [default: {default}]",
    )


@command()
@ROOT
@click.option(
    "--config",
    "file",
    metavar="FILE",
    help="A YAML file with these settings; options win over it.",
)
@click.option(
    "--host",
    metavar="ADDRESS",
    help="Where Prefect and MLflow listen.  [default: 127.0.0.1]",
)
@click.option(
    "--public-host",
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
    metavar="URL",
    help="PostgreSQL; with a password: $PREFECT_SERVER_DATABASE_CONNECTION_URL.",
)
@click.option(
    "--mlflow-database",
    metavar="URL",
    help="PostgreSQL; with a password: $MLFLOW_BACKEND_STORE_URI.",
)
@click.option(
    "--gpu-limit",
    type=click.IntRange(min=1),
    help="Runs at once in queue gpu.  [default: the number of GPUs, or 1]",
)
@click.option(
    "--cpu-limit",
    type=click.IntRange(min=1),
    help="Runs at once in queue cpu.  [default: half of the cores, or 2]",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1),
    default=300.0,
    help="Seconds until all is healthy.",
)
@click.option(
    "--foreground",
    is_flag=True,
    help="Stay, and stop everything on SIGTERM or Ctrl-C: for systemd and containers.",
)
@json_option("the status")
def up(
    root: str, file: str | None, timeout_s: float, foreground: bool, as_json: bool, **options: Any
) -> None:
    """Start Prefect, a worker, MLflow and Ray on this machine, and keep them alive.

    A second time it starts what is missing. Loopback only; --host elsewhere needs passwords in
    PREFECT_SERVER_API_AUTH_STRING (user:password) and MLFLOW_AUTH_ADMIN_PASSWORD.
    """
    from flows.ops import control

    given = {name: value for name, value in options.items() if value is not None and value != ()}
    tell = _quiet if as_json else _tell
    data = control.up(root, given, file=file, timeout_s=timeout_s, foreground=foreground, tell=tell)
    if foreground:
        return
    emit(data, as_json, _print)
    if not as_json:
        click.echo(f'for this shell:  eval "$(concur env --root {root})"')


@command()
@ROOT
@json_option("the status")
def status(root: str, as_json: bool) -> None:
    """Show each part of the stack as it answers now. Exit status 0 only if all of it is healthy."""
    from flows.ops import control

    data = control.status(root)
    emit(data, as_json, _print)
    sys.exit(0 if data["healthy"] else 1)


@command()
@ROOT
@json_option("what was stopped")
def down(root: str, as_json: bool) -> None:
    """Stop the stack and every run below it, within 70 s, usually 10. Databases, snapshots and logs
    stay."""
    from flows.ops import control

    data = control.down(root, _quiet if as_json else _tell)
    said = f"stopped in {data['seconds']:.1f} s" if data.get("processes") else NONE.format(root)
    emit(data, as_json, lambda _: click.echo(said))


@command()
@ROOT
def env(root: str) -> None:
    """Print the lines that point a shell at the stack: eval "$(concur env)"."""
    from flows.ops import control

    click.echo("\n".join(control.export_lines(root)))


def _tell(line: str) -> None:
    click.echo(line, err=True)


def _quiet(line: str) -> None:
    """With --json nothing but the object is printed."""


def _print(data: dict[str, Any]) -> None:
    if not data["parts"]:
        click.echo(NONE.format(data["root"]))
        return
    from tasks.progress import duration

    rows = [
        (
            row["part"],
            row["health"] + (f": {row['reason']}" if row["reason"] else ""),
            row["pid"] or "-",
            row["processes"],
            row["restarts"],
            "-" if row["uptime_s"] is None else duration(row["uptime_s"]),
            row["url"],
            row["log"],
        )
        for row in data["parts"]
    ]
    columns = ("part", "health", "pid", "processes", "restarts", "up", "at", "log")
    print_table(f"concur stack of {data['root']}", columns, rows)
    if data["supervisor"] is None:
        click.echo("the process manager does not run: `concur up` starts all parts again")
