"""`concur watchdog`: one look at the runs of a Prefect server, and what is done about those that
are stuck."""

from __future__ import annotations

import json
from typing import Any

import click


@click.command()
@click.option(
    "--pending-min",
    type=float,
    default=10,
    show_default=True,
    help="Minutes that a run may be pending.",
)
@click.option(
    "--heartbeat-min",
    type=float,
    default=15,
    show_default=True,
    help="Minutes without a heartbeat of its process.",
)
@click.option(
    "--silent-min",
    type=float,
    default=180,
    show_default=True,
    help="Minutes without progress, though its process lives.",
)
@click.option(
    "--cancelling-min",
    type=float,
    default=5,
    show_default=True,
    help="Minutes for its worker to end a cancelled run.",
)
@click.option(
    "--late-min",
    type=float,
    default=60,
    show_default=True,
    help="Minutes after which a run that nobody takes is told.",
)
@click.option(
    "--tag", default=None, help="Watch over runs with this tag only.  [default: all runs]"
)
@click.option("--dry-run", is_flag=True, help="Say what is stuck, and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON list.")
def watchdog(as_json: bool, dry_run: bool, **limits: Any) -> None:
    """Crash or cancel runs that are stuck, so that what they hold is free. Asks the Prefect server
    in PREFECT_API_URL."""
    from flows.cli.main import _guarded

    def work() -> list[dict[str, Any]]:
        from pydantic import ValidationError

        from flows.config import explained
        from flows.runtime.stuck import WatchdogConfig
        from kernels_eval.errors import UsageError

        try:
            config = WatchdogConfig.model_validate(limits)
        except ValidationError as error:
            raise explained(error, "concur watchdog", WatchdogConfig) from error
        from prefect.settings import get_current_settings

        if not get_current_settings().api.url:
            raise UsageError(
                "no Prefect server is named",
                "set PREFECT_API_URL, such as http://127.0.0.1:4200/api",
            )
        from flows.runtime.watchdog import watch

        return watch(config, dry_run=dry_run)

    found = _guarded(work)
    if as_json:
        click.echo(json.dumps(found))
        return
    if not found:
        click.echo("no run is stuck")
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="runs that are stuck")
    columns = ("name", "state", "why", "done")
    for column in columns:
        table.add_column(column, overflow="fold")
    for each in found:
        table.add_row(*(escape(str(each[column])) for column in columns))
    Console().print(table)
