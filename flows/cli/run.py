"""`concur run`: the whole line, or the refresh alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flows.cli.common import command, emit, json_option, print_table, profile_options

if TYPE_CHECKING:
    from flows.config import PipelineConfig


@command()
@profile_options("verification.workers=2")
@json_option("the summary")
@click.option(
    "--only", type=click.Choice(["refresh"]), help="Stop after the refresh (tasks to curated set)."
)
def run(profile: str, overrides: tuple[str, ...], as_json: bool, only: str | None) -> None:
    """Run the line: tasks, synthesis, verification, curation, training, benchmark, tracking."""
    from flows.config import load_profile
    from flows.launch import launch, require_ready
    from flows.ops.control import join_stack

    config = load_profile(profile, overrides)
    join_stack(config.root)
    require_ready(config)
    summary = launch(config, refresh_only=only == "refresh")
    emit(summary, as_json, lambda data: _print(config, data))


def _print(config: PipelineConfig, data: dict[str, Any]) -> None:
    title = f"concur {config.name} ({config.language.value})"
    print_table(title, ("", ""), data["summary"].items())
    new = ", ".join(data["new_work_in"])
    click.echo(
        f"done in {data['seconds']:.0f} s"
        + (f"; new work in: {new}" if new else ": nothing was new, all snapshots existed already")
    )
    if "report" not in data:
        return
    environment = os.environ
    click.echo(f"report:      {data['report']}")
    if served := environment.get("PREFECT_API_URL"):
        click.echo(f"Prefect UI:  {served.removesuffix('/api')}")
    else:
        start = (
            f"PREFECT_HOME={environment.get('PREFECT_HOME', '')} {_tool('prefect')} server start"
        )
        click.echo(f"Prefect UI:  {start}   (http://127.0.0.1:4200)")
    if config.tracking.enabled:
        where = config.tracking_uri
        artifacts = f"{Path(config.root).absolute()}/mlartifacts"
        start = (
            f"{_tool('mlflow')} server --backend-store-uri {where}"
            f" --artifacts-destination {artifacts}   (http://127.0.0.1:5000)"
        )
        click.echo(f"MLflow UI:   {where if where.startswith('http') else start}")


def _tool(name: str) -> str:
    """The command as this user can type it: beside the running interpreter if it is there."""
    beside = Path(sys.executable).with_name(name)
    if not beside.exists():
        return name
    here = Path.cwd()
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)
