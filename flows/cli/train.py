"""`concur train`: an adapter from an existing training set."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import click

from flows.cli.common import command, emit, json_option, profile_options, root_option
from flows.cli.curate import CURATED
from kernels_eval.errors import UsageError


@command()
@root_option()
@CURATED
@profile_options(
    "training.num_epochs=1", profile="The profile whose `training` and `tracking` are used."
)
@click.option(
    "--merged",
    metavar="DIR",
    help="Write base and adapter as one model there, if they agree.",
)
@click.option(
    "--merged-dtype",
    type=click.Choice(["bfloat16", "float32"]),
    default="bfloat16",
    help="Type of the merged weights.",
)
@json_option("the summary")
def train(
    as_json: bool,
    root: str,
    curated: str | None,
    profile: str,
    overrides: tuple[str, ...],
    merged: str | None,
    merged_dtype: Literal["bfloat16", "float32"],
) -> None:
    """Train an adapter on an existing curated set; print where it is and its run in MLflow.

    Rerun the same command to resume one that was stopped.
    """
    from flows.config import load_profile
    from flows.launch import TerminalProgress, embed, start_server_apart
    from flows.ops.control import join_stack
    from tasks.progress import observed_by
    from tasks.publishing.lineage import find_curated

    join_stack(root)
    given = load_profile(profile, overrides)
    if merged and Path(merged).exists():  # now, and not after hours of training
        raise UsageError(f"{merged} exists", "give a new directory for the merged weights")
    place = find_curated(root, curated).root
    embed(given.model_copy(update={"root": place}))  # before prefect is imported
    from flows.train import merge_trained, of_line, summary_of, train_and_track

    config, tasks, found = of_line(root, curated, given)
    started = time.monotonic()
    start_server_apart()
    with TerminalProgress() as progress, observed_by(progress):
        trained, tracked = train_and_track(config, tasks, found)
    summary = summary_of(config, found, trained) | {
        "new_work": "training" in progress.worked,
        "seconds": round(time.monotonic() - started, 1),
        "mlflow": tracked and tracked.model_dump(),
    }
    if merged:
        summary["merged"] = merge_trained(config, tasks, found, trained, Path(merged), merged_dtype)
    emit(summary, as_json, print_trained)


def print_trained(data: dict[str, Any]) -> None:
    """The end of a training on a terminal: what it learnt, where the adapter is, how to serve it,
    where MLflow has it."""
    dropped = f", {data['dropped']:,} left out" if data["dropped"] else ""
    state = "new" if data["new_work"] else "trained before"
    size = f"rank {data['rank']}, {data['size_bytes'] / 1e6:,.1f} MB"
    first, last = data["loss_first"], data["loss_last"]
    lines = {
        "trained on": f"{data['rows']:,} rows of {data['curated']}{dropped}",
        "loss": f"{first:.4f} in the first epoch, {last:.4f} in the last",
    }
    if held_out := list(data["held_out"].values()):
        lines["held out"] = f"{held_out[0]:.4f} at first, {held_out[-1]:.4f} at last"
    lines["adapter"] = f"{data['adapter']} ({size}, {state})"
    if merged := data.get("merged"):
        share = f"{merged['relative_difference']:.2%} of what the adapter changes"
        lines["merged"] = f"{merged['directory']} ({merged['dtype']}, differs by {share})"
    lines["serve"] = (
        f"vllm serve {data['base_model']} --enable-lora --max-lora-rank {data['rank']}"
        f" --lora-modules tuned={data['adapter']}"
    )
    if mlflow := data["mlflow"]:
        lines["MLflow"] = (
            f"run {mlflow['run_id']} in {mlflow['experiment']}, model {mlflow['model_version']},"
            f" at {mlflow['tracking_uri']}"
        )
    for name, line in lines.items():
        print(f"{name:<11} {line}")
