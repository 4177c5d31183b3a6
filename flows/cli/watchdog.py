"""`concur watchdog`: look once at the runs of a Prefect server, and free what stuck runs hold."""

from __future__ import annotations

from typing import Any

import click

from flows.cli.common import Function, command, emit, print_table

LIMITS = {
    "pending": (10, "Minutes that a run may be pending."),
    "heartbeat": (15, "Minutes without a heartbeat of its process."),
    "silent": (180, "Minutes without progress, though its process lives."),
    "cancelling": (5, "Minutes for its worker to end a cancelled run."),
    "late": (60, "Minutes after which a run that no worker takes is reported."),
}


def limits(function: Function) -> Function:
    """`--pending-min` and its like: options of WatchdogConfig."""
    for name, (default, help) in reversed(LIMITS.items()):
        option = click.option(f"--{name}-min", type=float, default=default, help=help)
        function = option(function)
    return function


@command()
@limits
@click.option("--tag", help="Watch over runs with this tag only.  [default: all runs]")
@click.option("--dry-run", is_flag=True, help="Report stuck runs, and change nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON list.")
def watchdog(as_json: bool, dry_run: bool, **limits: Any) -> None:
    """Crash or cancel stuck runs, so that what they hold is free.

    Asks the Prefect server in PREFECT_API_URL.
    """
    from prefect.settings import get_current_settings

    from flows.config import validated
    from flows.ops.stuck import WatchdogConfig
    from kernels_eval.errors import UsageError

    config = validated(WatchdogConfig, limits, "concur watchdog")
    if not get_current_settings().api.url:
        raise UsageError(
            "no Prefect server is named", "set PREFECT_API_URL, such as http://127.0.0.1:4200/api"
        )
    from flows.ops.watchdog import watch

    emit(watch(config, dry_run=dry_run), as_json, _print)


def _print(found: list[dict[str, Any]]) -> None:
    if not found:
        click.echo("no run is stuck")
        return
    columns = ("name", "state", "why", "done")
    print_table("stuck runs", columns, [[each[name] for name in columns] for each in found])
