"""`concur gc`: shows which snapshots nothing refers to any more, and removes them when told to."""

from __future__ import annotations

import json
from typing import Any

import click


@click.command()
@click.option("--root", default=".concur", show_default=True, help="Where the snapshots are.")
@click.option(
    "--keep",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    metavar="N",
    help="Keep the newest N refreshes.",
)
@click.option(
    "--younger-than",
    type=click.FloatRange(min=0),
    default=7,
    show_default=True,
    metavar="DAYS",
    help="Keep finished snapshots of that age.",
)
@click.option(
    "--unfinished",
    type=click.FloatRange(min=0),
    default=14,
    show_default=True,
    metavar="DAYS",
    help="Keep unfinished ones touched since.",
)
@click.option(
    "--logs",
    type=click.FloatRange(min=0),
    default=30,
    show_default=True,
    metavar="DAYS",
    help="Keep logs written to since.",
)
@click.option(
    "--published",
    multiple=True,
    metavar="DIR",
    help="A published folder that lies elsewhere. Repeat.",
)
@click.option(
    "--tracking-uri",
    default=None,
    metavar="URI",
    help="MLflow.  [default: MLFLOW_TRACKING_URI, else the root's mlflow.db]",
)
@click.option("--without-mlflow", is_flag=True, help="Decide without what MLflow refers to.")
@click.option(
    "--cache-limit",
    type=click.FloatRange(min=0.07),
    default=None,
    metavar="GB",
    help="Of the build cache.  [default: its own]",
)
@click.option("--delete", is_flag=True, help="Do it. Without, it is shown only.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print every snapshot with its reason as one JSON object.",
)
def gc(as_json: bool, **options: Any) -> None:
    """Show which snapshots nothing refers to; with --delete, remove them.

    What a finished run, a registered model or a published folder refers to is kept, with everything
    that it was made of.
    """
    from flows.cli.main import _guarded

    def work() -> dict[str, Any]:
        from flows.ops.gc_collect import collect
        from flows.ops.gc_plan import Keep

        limit = options["cache_limit"]
        return collect(
            options["root"],
            keep=Keep(
                refreshes=options["keep"],
                younger_than_days=options["younger_than"],
                unfinished_days=options["unfinished"],
            ),
            delete=options["delete"],
            uri=options["tracking_uri"],
            without_mlflow=options["without_mlflow"],
            publications=options["published"],
            cache_limit_bytes=None if limit is None else int(limit * 1e9),
            log_days=options["logs"],
        )

    data = _guarded(work)
    if as_json:
        click.echo(json.dumps(data))
        return
    from flows.ops.gc_collect import print_collected

    print_collected(data)
