"""`concur watchdog`: one look at the runs of a Prefect server, and what is done about those that
are stuck."""

from __future__ import annotations

from typing import Any

import click

from flows.cli.common import command, emit, print_table


@command()
@click.option(
    "--pending-min",
    type=float,
    default=10,
    help="Minutes that a run may be pending.",
)
@click.option(
    "--heartbeat-min",
    type=float,
    default=15,
    help="Minutes without a heartbeat of its process.",
)
@click.option(
    "--silent-min",
    type=float,
    default=180,
    help="Minutes without progress, though its process lives.",
)
@click.option(
    "--cancelling-min",
    type=float,
    default=5,
    help="Minutes for its worker to end a cancelled run.",
)
@click.option(
    "--late-min",
    type=float,
    default=60,
    help="Minutes after which a run that nobody takes is told.",
)
@click.option("--tag", help="Watch over runs with this tag only.  [default: all runs]")
@click.option("--dry-run", is_flag=True, help="Say what is stuck, and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON list.")
def watchdog(as_json: bool, dry_run: bool, **limits: Any) -> None:
    """Crash or cancel runs that are stuck, so that what they hold is free. Asks the Prefect server
    in PREFECT_API_URL."""
    from prefect.settings import get_current_settings
    from pydantic import ValidationError

    from flows.config import explained
    from flows.runtime.stuck import WatchdogConfig
    from kernels_eval.errors import UsageError

    try:
        config = WatchdogConfig.model_validate(limits)
    except ValidationError as error:
        raise explained(error, "concur watchdog", WatchdogConfig) from error
    if not get_current_settings().api.url:
        raise UsageError(
            "no Prefect server is named", "set PREFECT_API_URL, such as http://127.0.0.1:4200/api"
        )
    from flows.runtime.watchdog import watch

    emit(watch(config, dry_run=dry_run), as_json, _print)


def _print(found: list[dict[str, Any]]) -> None:
    if not found:
        click.echo("no run is stuck")
        return
    columns = ("name", "state", "why", "done")
    print_table("stuck runs", columns, [[each[name] for name in columns] for each in found])
