"""`concur search`: faster kernels from correct ones."""

from __future__ import annotations

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
    from flows.launch import embed, served_and_shown
    from flows.ops.control import join_stack

    join_stack(root)
    embed(config := load_profile(profile, [f"root={root}", *overrides]))  # before prefect
    from flows.search import begun_with, search_and_track, summary_of

    begun = begun_with(config, verdicts)
    with served_and_shown() as progress:
        searched, _ = search_and_track(*begun)
    summary = summary_of(searched) | {"seconds": progress.seconds}
    emit(summary, as_json, "search")
