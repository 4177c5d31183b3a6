"""`concur train`: an adapter from an existing training set."""

from __future__ import annotations

from typing import Any

import click

from flows.cli.common import command, emit, json_option, profile_options, root_option
from flows.cli.curate import CURATED


@command()
@root_option()
@CURATED
@profile_options(
    "training.num_epochs=1", profile="The profile whose `training` and `tracking` are used."
)
@click.option(
    "--merged",
    default=None,
    metavar="DIR",
    help="Write base and adapter as one model there, if they agree.",
)
@click.option(
    "--merged-dtype",
    type=click.Choice(["bfloat16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Type of the merged weights.",
)
@json_option("the summary")
def train(as_json: bool, root: str, curated: str | None, **options: Any) -> None:
    """Train an adapter on an existing curated set; print where it is and its run in MLflow.

    Rerun the same command to resume one that was stopped.
    """
    from flows.ops.control import join_stack
    from flows.train_set import print_trained, train_set

    join_stack(root)
    emit(train_set(root, curated, **options), as_json, print_trained)
