"""`concur run`: the whole pipeline, or the refresh only."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from flows.cli.common import command, emit, require_extras


@command
def run(profile: str, overrides: tuple[str, ...], as_json: bool, only: str | None) -> None:
    """Run the pipeline: tasks, synthesis, verification, curation, training, benchmark, tracking."""
    require_extras(["line"] if only else ["line", "train"])
    from flows.config import load_profile
    from flows.launch import launch, require_ready
    from flows.ops.control import join_stack

    config = load_profile(profile, overrides)
    join_stack(config.root)
    require_ready(config, "refresh", *(() if only else ("training", "benchmark")))
    summary = launch(config, refresh_only=only == "refresh")
    place = Path(config.root).absolute()
    emit(summary, as_json, "run", config=config, place=place, environment=os.environ, tool=_tool)


def _tool(name: str) -> str:
    """The command as this user can type it: beside the running interpreter if it is there."""
    beside = Path(sys.executable).with_name(name)
    if not beside.exists():
        return name
    here = Path.cwd()
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)
