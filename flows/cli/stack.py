"""Commands that run the servers a nightly pipeline needs, on this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer import Option

from flows.cli.common import Group, Json, StackRoot, command, tell
from kernels_eval.installation import command_at


def port(default: int, text: str) -> Any:
    return Option(default, min=1024, max=65534, metavar="PORT", help=text)


@command(Group.STACK, needs=["line"])
def up(
    *,
    root: StackRoot = ".concur",
    prefect_port: int = port(4200, "Port of the Prefect server."),
    mlflow_port: int = port(5000, "Port of the MLflow server."),
    ray_port: int = port(6379, "Port of the Ray head; Ray Client takes the next."),
    timeout_s: Annotated[float | None, Option(min=1)] = None,
) -> Json:
    """Start Prefect, a worker, MLflow and Ray here, and keep them alive.

    Parts that run already are left alone. Everything listens on loopback.

    Options:
        timeout_s --timeout: Seconds to wait until all parts are healthy. [default: as long as
            it takes]
    """
    from flows.stack import control
    from flows.stack.layout import StackSettings

    settings = StackSettings(prefect_port=prefect_port, mlflow_port=mlflow_port, ray_port=ray_port)
    data = control.up(root, settings, tell, timeout_s)
    return data | {"for_this_shell": f'eval "$({command_at("env", root)})"'}


@command(Group.STACK, needs=["line"], succeeded="healthy")
def status(
    *,
    root: StackRoot = ".concur",
) -> Json:
    """Show the state of each part of the stack. Exit status 0 only if all parts are healthy."""
    tell("asks each part of the stack")
    from flows.stack import control

    return control.status(root)


@command(Group.STACK, needs=["line"])
def down(
    *,
    root: StackRoot = ".concur",
) -> Json:
    """Stop the stack and its runs. Databases, snapshots and logs are kept."""
    from flows.stack import control

    return control.down(root, tell)


@command(Group.STACK, needs=["line"], prints=False)
def env(
    *,
    root: StackRoot = ".concur",
) -> None:
    """Print the lines that point a shell at the stack: eval "$(concur env)"."""
    from flows.stack import control

    typer.echo("\n".join(control.export_lines(root)))
