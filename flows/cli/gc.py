"""`concur gc`: shows which snapshots nothing refers to any more, and removes them when told to."""

from __future__ import annotations

from typing import Any

import click

from flows.cli.common import command, emit, root_option


@command()
@root_option()
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
    from flows.ops.gc_collect import collect, print_collected
    from flows.ops.gc_plan import Keep

    limit = options["cache_limit"]
    data = collect(
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
    emit(data, as_json, print_collected)
