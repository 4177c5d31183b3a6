"""`concur gc`: show which snapshots nothing refers to, and remove them when told to."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import click

from flows.cli.common import Option, command, emit, print_table, root_option


def _days(name: str, target: str, default: int, help: str) -> Option:
    return click.option(
        f"--{name}",
        target,
        type=click.FloatRange(min=0),
        default=default,
        metavar="DAYS",
        help=help,
    )


@command()
@root_option()
@click.option(
    "--keep",
    "refreshes",
    type=click.IntRange(min=0),
    default=5,
    metavar="N",
    help="Keep the newest N refreshes.",
)
@_days("younger-than", "younger_than_days", 7, "Keep finished snapshots younger than this.")
@_days("unfinished", "unfinished_days", 14, "Keep unfinished snapshots that changed since.")
@_days("logs", "log_days", 30, "Keep logs written to since.")
@click.option(
    "--published",
    "published_folders",
    multiple=True,
    metavar="DIR",
    help="A published folder outside the root. Repeat.",
)
@click.option(
    "--tracking-uri",
    metavar="URI",
    help="MLflow.  [default: MLFLOW_TRACKING_URI, else the root's mlflow.db]",
)
@click.option("--without-mlflow", is_flag=True, help="Decide without what MLflow refers to.")
@click.option(
    "--cache-limit",
    "cache_limit_gb",
    type=click.FloatRange(min=0.07),
    metavar="GB",
    help="Limit of the build cache.  [default: its own]",
)
@click.option("--delete", is_flag=True, help="Remove them; without it, gc only reports.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print every snapshot with its reason as one JSON object.",
)
def gc(
    root: str,
    refreshes: int,
    younger_than_days: float,
    unfinished_days: float,
    as_json: bool,
    **options: Any,
) -> None:
    """Show which snapshots nothing refers to; with --delete, remove them.

    What a finished run, a registered model or a published folder refers to is kept, with everything
    it was made from.
    """
    from flows.ops.gc import collect
    from flows.ops.gc_plan import Keep

    keep = Keep(
        refreshes=refreshes, younger_than_days=younger_than_days, unfinished_days=unfinished_days
    )
    emit(collect(root, keep=keep, **options), as_json, _print)


def _print(data: dict[str, Any]) -> None:
    """Groups of stage and reason with their sizes, what goes first; then the totals."""
    went = "gone" if data["deleted"] else "would go"
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for one in data["snapshots"]:
        needed = one["reason"].endswith(" needs it")
        reason = "needed by another snapshot that stays" if needed else one["reason"]
        groups["stays" if one["stays"] else went, one["stage"], reason].append(one["bytes"])
    for one in data["others"]:
        stage = Path(one["path"]).parent.name if "log" in one["reason"] else "training"
        groups[went, stage, one["reason"]].append(one["bytes"])
    if data["trash_bytes"]:
        groups[went, ".gc-trash", "left by a gc that was interrupted"].append(data["trash_bytes"])
    rows = [
        (*group, f"{len(sizes):,}", in_units(sum(sizes)))
        for group, sizes in sorted(groups.items(), key=lambda item: (item[0][0] != went, item[0]))
    ]
    columns = ("", "stage", "why", "number", "size")
    print_table(f"concur gc {data['root']}", columns, rows, right=("number", "size"))
    cache = data["build_cache"]
    limit = in_units(cache["limit_bytes"]) if cache["limit_bytes"] else "no limit"
    removed = f", {cache['removed_entries']} builds removed" if cache["removed_entries"] else ""
    held = f"{in_units(cache['bytes'])} in {cache['entries']:,} builds"
    click.echo(f"build cache: {held}, limit {limit}{removed}")
    for warning in data["warnings"]:
        click.echo(f"warning: {warning}")
    freed = f"{'freed' if data['deleted'] else 'would free'} {in_units(data['freed_bytes'])}"
    click.echo(f"{freed}, {in_units(data['kept_bytes'])} of snapshots stay")
    if not data["deleted"]:
        click.echo("nothing was removed; add --delete to remove what would go")


def in_units(size: float) -> str:
    """Bytes for a person, in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"
