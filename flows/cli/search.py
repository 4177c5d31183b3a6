"""`concur search`: faster kernels from correct ones."""

from __future__ import annotations

import time

from flows.cli.common import command, emit


@command
def search(
    as_json: bool, root: str, profile: str, verdicts: str | None, overrides: tuple[str, ...]
) -> None:
    """Search for faster variants of correct kernels; print the gains that are confirmed.

    Block and tile sizes, unrolling and launch bounds are changed; with search.operators also flags,
    and a model rewrites. Rerun the same command to resume a search that was stopped.
    """
    from flows.config import load_profile
    from flows.launch import TerminalProgress, embed, start_server_apart
    from flows.ops.control import join_stack
    from tasks.progress import observed_by

    join_stack(root)
    embed(config := load_profile(profile, [f"root={root}", *overrides]))  # before prefect
    from flows.search import begun_with, search_and_track, summary_of

    begun = begun_with(config, verdicts)
    began_s = time.monotonic()
    start_server_apart()
    with TerminalProgress() as progress, observed_by(progress):
        searched, _ = search_and_track(*begun)
    summary = summary_of(searched) | {"seconds": round(time.monotonic() - began_s, 1)}
    emit(summary, as_json, "search")
