"""`concur curate`, `concur publish` and `concur diff`: choose, publish, compare training sets."""

from __future__ import annotations

from typing import Any

import click

from flows.cli.common import command, emit


@command
def curate(
    sizes: str | None, out: str | None, explain: str | None, as_json: bool, **options: object
) -> None:
    """Choose training sets from existing verdicts, by one strategy or many."""
    from flows.curate import curate_table, explain_candidate, parsed_sizes

    options["sizes"] = parsed_sizes(sizes)
    if explain is None:
        emit(curate_table(out=out, **options), as_json, "curate")
    else:
        emit({"explanations": explain_candidate(explain, **options)}, as_json, "explain")


@command
def publish(as_json: bool, root: str, out: str, **options: Any) -> None:
    """Write a curated set as a folder that datasets.load_dataset loads."""
    from tasks.publishing.sets import publish_set

    emit(publish_set(root, out, **options), as_json, "publish")


@command
@click.argument("old")
@click.argument("new")
def diff(old: str, new: str, root: str, as_json: bool) -> None:
    """Compare two curated snapshots or published folders: what changed, and why."""
    from tasks.publishing.sets import diff_sets

    click.echo(diff_sets(root, old, new, as_json=as_json))
