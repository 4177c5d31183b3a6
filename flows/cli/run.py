"""`concur run`: the whole line, or the refresh alone."""

from __future__ import annotations

import click

from flows.cli.common import command, emit, json_option, profile_options


@command()
@profile_options("verification.workers=2")
@json_option("the summary")
@click.option(
    "--only",
    type=click.Choice(["refresh"]),
    default=None,
    help="Stop after the refresh (tasks to curated set).",
)
def run(profile: str, overrides: tuple[str, ...], as_json: bool, only: str | None) -> None:
    """Run the line: tasks, synthesis, verification, curation, training, benchmark, tracking."""
    from flows.config import load_profile
    from flows.launch import launch, require_ready
    from flows.ops.control import join_stack

    config = load_profile(profile, overrides)
    join_stack(config.root)
    require_ready(config)
    summary = launch(config, refresh_only=only == "refresh", quiet=as_json)
    emit(summary, as_json, lambda _: click.echo())
