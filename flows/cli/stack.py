"""Commands that run the servers a nightly pipeline needs, on this machine."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from typer import Option

from flows.cli.common import Group, Json, StackRoot, command, repeated
from kernels_eval.errors import UsageError


class Part(StrEnum):
    """A part of the stack."""

    PREFECT = "prefect"
    MLFLOW = "mlflow"
    PAGES = "pages"
    RAY = "ray"
    WORKER = "worker"


@command(Group.STACK, needs=["line"])
def up(
    *,
    root: StackRoot = ".concur",
    file: Annotated[
        str | None,
        Option(
            "--config",
            metavar="FILE",
            help="YAML file with these settings; options override it.",
        ),
    ] = None,
    host: Annotated[
        str | None,
        Option(
            metavar="ADDRESS",
            help="Where Prefect, MLflow and pages listen.",
            show_default="127.0.0.1",
        ),
    ] = None,
    public_host: Annotated[
        str | None,
        Option(metavar="NAME", help="Name by which other machines reach this one, with --host."),
    ] = None,
    allowed_hosts: Annotated[
        list[str],
        repeated(
            "--allowed-host",
            metavar="NAME",
            help="Another host name that MLflow and pages accept, with --host.",
        ),
    ],
    prefect_port: Annotated[
        int | None, Option(metavar="PORT", help="Port of the Prefect server.", show_default="4200")
    ] = None,
    worker_port: Annotated[
        int | None,
        Option(
            metavar="PORT", help="Port of the worker's health, on loopback.", show_default="4280"
        ),
    ] = None,
    mlflow_port: Annotated[
        int | None, Option(metavar="PORT", help="Port of the MLflow server.", show_default="5000")
    ] = None,
    pages_port: Annotated[
        int | None,
        Option(metavar="PORT", help="Port of reports and the viewer.", show_default="4290"),
    ] = None,
    ray_port: Annotated[
        int | None,
        Option(metavar="PORT", help="Port of the Ray head, on loopback.", show_default="6379"),
    ] = None,
    ray_client_port: Annotated[
        int | None,
        Option(metavar="PORT", help="Port of Ray Client, on loopback.", show_default="10001"),
    ] = None,
    ray_dashboard_port: Annotated[
        int | None,
        Option(
            metavar="PORT",
            help="Port of Ray's dashboard, on loopback.",
            show_default="no dashboard",
        ),
    ] = None,
    without: Annotated[
        list[Part],
        repeated(help="Do not start this part."),
    ],
    prefect_database: Annotated[
        str | None,
        Option(
            metavar="URL",
            help="PostgreSQL URL; one with a password goes to"
            " $PREFECT_SERVER_DATABASE_CONNECTION_URL.",
        ),
    ] = None,
    mlflow_database: Annotated[
        str | None,
        Option(
            metavar="URL",
            help="PostgreSQL URL; one with a password goes to $MLFLOW_BACKEND_STORE_URI.",
        ),
    ] = None,
    gpu_limit: Annotated[
        int | None,
        Option(
            min=1,
            help="Parallel flow runs in the queue gpu.",
            show_default="the number of GPUs, or 1",
        ),
    ] = None,
    cpu_limit: Annotated[
        int | None,
        Option(
            min=1,
            help="Parallel flow runs in the queue cpu.",
            show_default="half of the cores, or 2",
        ),
    ] = None,
    timeout_s: Annotated[
        float,
        Option("--timeout", min=1, help="Seconds to wait until all parts are healthy."),
    ] = 300.0,
    foreground: Annotated[
        bool,
        Option("--foreground", help="Stay in the foreground; stop all parts on SIGTERM or Ctrl-C."),
    ] = False,
) -> Json:
    """Start Prefect, a worker, MLflow, Ray and the report pages here, and keep them alive.

    If some parts are already running, it starts the others. The servers listen on loopback;
    another --host needs passwords in PREFECT_SERVER_API_AUTH_STRING (user:password) and
    MLFLOW_AUTH_ADMIN_PASSWORD.
    """
    from flows.ops import control

    options = {
        "host": host,
        "public_host": public_host,
        "allowed_hosts": tuple(allowed_hosts),
        "prefect_port": prefect_port,
        "worker_port": worker_port,
        "mlflow_port": mlflow_port,
        "pages_port": pages_port,
        "ray_port": ray_port,
        "ray_client_port": ray_client_port,
        "ray_dashboard_port": ray_dashboard_port,
        "without": tuple(part.value for part in without),
        "prefect_database": prefect_database,
        "mlflow_database": mlflow_database,
        "gpu_limit": gpu_limit,
        "cpu_limit": cpu_limit,
    }
    given = {name: value for name, value in options.items() if value not in (None, ())}
    data = control.up(root, given, file=file, timeout_s=timeout_s, foreground=foreground, tell=tell)
    return data | {"for_this_shell": f'eval "$(concur env --root {root})"'}


@command(Group.STACK, needs=["line"], succeeded="healthy")
def status(*, root: StackRoot = ".concur") -> Json:
    """Show the state of each part of the stack. Exit status 0 only if all parts are healthy."""
    from flows.ops import control

    return control.status(root)


@command(Group.STACK, needs=["line"])
def down(*, root: StackRoot = ".concur") -> Json:
    """Stop the stack and its runs. Databases, snapshots and logs are kept.

    This takes 10 s as a rule, and 70 s at most.
    """
    from flows.ops import control

    return control.down(root, tell)


@command(Group.STACK, needs=["line"], prints=False)
def env(*, root: StackRoot = ".concur") -> None:
    """Print the lines that point a shell at the stack: eval "$(concur env)"."""
    from flows.ops import control

    typer.echo("\n".join(control.export_lines(root)))


@command(Group.STACK, needs=["line"])
def watchdog(
    *,
    pending_min: Annotated[float, Option(help="Minutes that a run may be pending.")] = 10.0,
    heartbeat_min: Annotated[
        float, Option(help="Minutes that a run may be without a heartbeat.")
    ] = 15.0,
    silent_min: Annotated[
        float, Option(help="Minutes that a live run may be without progress.")
    ] = 180.0,
    cancelling_min: Annotated[
        float, Option(help="Minutes that a worker may take to end a cancelled run.")
    ] = 5.0,
    late_min: Annotated[float, Option(help="Minutes that a run may wait for a worker.")] = 60.0,
    tag: Annotated[
        str | None, Option(help="Watch only runs with this tag.", show_default="all runs")
    ] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Report stuck runs without changing anything.")
    ] = False,
) -> Json:
    """End stuck runs, so that their slots are free again.

    Asks the Prefect server in PREFECT_API_URL.
    """
    from prefect.settings import get_current_settings

    from flows.config import validated
    from flows.ops.watchdog import watch
    from flows.runtime.config import WatchdogConfig

    limits = {
        "pending_min": pending_min,
        "heartbeat_min": heartbeat_min,
        "silent_min": silent_min,
        "cancelling_min": cancelling_min,
        "late_min": late_min,
        "tag": tag,
    }
    config = validated(WatchdogConfig, limits, "concur watchdog")
    if not get_current_settings().api.url:
        raise UsageError(
            "no Prefect server is named", "set PREFECT_API_URL, such as http://127.0.0.1:4200/api"
        )
    return {"stuck": watch(config, dry_run=dry_run)}


def tell(line: str) -> None:
    """Say on stderr what is under way."""
    typer.echo(line, err=True)
