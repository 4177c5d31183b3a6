"""`concur up`, `concur status`, `concur down` and `concur env`: the servers that a line needs to
run every night, on this machine."""

from __future__ import annotations

import sys

import click

from flows.cli.common import command, emit


@command
def up(
    root: str,
    file: str | None,
    timeout_s: float,
    foreground: bool,
    as_json: bool,
    **options: object,
) -> None:
    """Start Prefect, a worker, MLflow, Ray and the report pages here, and keep them alive.

    If some parts are already running, it starts the others. The servers listen on loopback;
    another --host needs passwords in PREFECT_SERVER_API_AUTH_STRING (user:password) and
    MLFLOW_AUTH_ADMIN_PASSWORD.
    """
    from flows.ops import control

    given = {name: value for name, value in options.items() if value is not None and value != ()}
    tell = _quiet if as_json else _tell
    data = control.up(root, given, file=file, timeout_s=timeout_s, foreground=foreground, tell=tell)
    if not foreground:
        emit(data, as_json, "stack", exports=root)


@command
def status(root: str, as_json: bool) -> None:
    """Show the state of each part of the stack. Exit status 0 only if all parts are healthy."""
    from flows.ops import control

    data = control.status(root)
    emit(data, as_json, "stack", exports=None)
    sys.exit(0 if data["healthy"] else 1)


@command
def down(root: str, as_json: bool) -> None:
    """Stop the stack and its runs. Databases, snapshots and logs are kept.

    This takes 10 s as a rule, and 70 s at most.
    """
    from flows.ops import control

    emit(control.down(root, _quiet if as_json else _tell), as_json, "down", root=root)


@command
def env(root: str) -> None:
    """Print the lines that point a shell at the stack: eval "$(concur env)"."""
    from flows.ops import control

    click.echo("\n".join(control.export_lines(root)))


def _tell(line: str) -> None:
    click.echo(line, err=True)


def _quiet(line: str) -> None:
    """With --json nothing but the object is printed."""
