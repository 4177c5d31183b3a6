"""`concur train`: an adapter from a curated set that is there, where it lies, and where MLflow has
it.

Guarantees: the prompts are those that the set's own line rendered (its tasks, its language, its
line on the hardware), whatever the profile says of them; a set that was trained on with the same
recipe before is not trained on again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flows.config import PipelineConfig, load_profile
from kernels_eval.errors import UsageError
from kernels_eval.records import Language

if TYPE_CHECKING:
    from tasks.store.snapshot import SnapshotRef

PROBES = 8  # rows on which merged and unmerged weights are compared


def train_set(
    root: str,
    curated: str | None = None,
    *,
    profile: str = "local",
    overrides: Sequence[str] = (),
    merged: str | None = None,
    merged_dtype: Literal["bfloat16", "float32"] = "bfloat16",
) -> dict[str, Any]:
    """Train on a curated snapshot (a fingerprint under `root`, or a directory; the newest where
    None). Returns a summary.

    `profile` and `overrides` give `training` and `tracking`. `merged` is a new directory for merged
    weights. Raises UsageError for what is not there or cannot be used, EvalError for what breaks:
    the same command goes on from the newest checkpoint.
    """
    config, tasks, found = prepared(root, curated, load_profile(profile, tuple(overrides)))
    if merged and Path(merged).exists():  # now, and not after hours of training
        raise UsageError(
            f"{merged} exists", "give a directory for the merged weights that does not"
        )
    from flows.launch import TerminalProgress, embed, start_server_apart
    from tasks.progress import observed_by

    embed(config)  # before prefect is imported
    started = time.monotonic()
    start_server_apart()
    with TerminalProgress() as progress, observed_by(progress):
        from flows.train import train_and_track

        trained, tracked = train_and_track(config, tasks, found)
    from tasks.synthesis.prompts import render
    from tasks.training.stage import prompts_of

    summary = _summary(config, found, trained)
    summary |= {
        "new_work": "training" in progress.worked,
        "seconds": round(time.monotonic() - started, 1),
        "mlflow": tracked and tracked.model_dump(),
    }
    if merged:
        prompts = prompts_of(tasks, config.language, render, config.synthesis.hardware)
        summary["merged"] = {
            "directory": str(Path(merged).absolute()),
            **_merge(found, trained, prompts, Path(merged), merged_dtype),
        }
    return summary


def prepared(
    root: str, name: str | None, config: PipelineConfig
) -> tuple[PipelineConfig, SnapshotRef, SnapshotRef]:
    """(configuration, tasks, curated set) of a training: what the set's line says of its prompts
    replaces what the profile says.

    Raises UsageError where the set is not there, is empty, holds several languages, or its tasks
    are gone.
    """
    from tasks.publishing.lineage import find_curated, lineage

    ref = find_curated(root, name)
    line = lineage(ref)
    if not line.curated.has_column("language"):
        raise UsageError(
            f"the curated set {line.curated.path} is empty",
            "there is nothing to train on: curate again, with a lower bar",
        )
    languages = sorted(line.curated.read(columns=["language"])["language"].unique().to_list())
    if len(languages) != 1:
        raise UsageError(
            f"the curated set {line.curated.path} holds kernels in {', '.join(languages)}",
            "curate each language by itself",
        )
    if line.tasks is None:
        raise UsageError(
            f"the tasks of the curated set {line.curated.path} are not under {ref.root}",
            "restore their snapshot, or run again",
        )
    hardware = ((line.candidates.manifest.get("config") or {}) if line.candidates else {}).get(
        "hardware"
    )
    changes = {
        "root": ref.root,
        "language": Language(languages[0]),
        "synthesis": config.synthesis.model_copy(update={"hardware": hardware}),
    }
    return config.model_copy(update=changes), line.tasks.ref, ref


def _summary(config: PipelineConfig, curated: SnapshotRef, trained: SnapshotRef) -> dict[str, Any]:
    from tasks.training.adapter import check_adapter
    from tasks.training.evaluation import COLUMN
    from tasks.training.stage import adapter_of

    snapshot, adapter = trained.open(), adapter_of(trained)
    manifest = snapshot.manifest
    facts = check_adapter(adapter, max_rank=2**31)
    held_out = {}
    if snapshot.has_column(COLUMN):
        frame = (
            snapshot.read(columns=["step", COLUMN], unique="step").drop_nulls(COLUMN).sort("step")
        )
        held_out = {str(step): loss for step, loss in frame.iter_rows()}
    return {
        "curated": curated.fingerprint,
        "training": trained.fingerprint,
        "rows": manifest["rows"],
        "dropped": len(manifest.get("dropped") or ()),
        "loss_first": manifest["loss_first"],
        "loss_last": manifest["loss_last"],
        "held_out": held_out,
        "adapter": str(adapter.absolute()),
        "base_model": str(manifest.get("base_model") or config.training.base_model),
        "rank": facts.rank,
        "size_bytes": facts.size_bytes,
    }


def _merge(
    curated: SnapshotRef, trained: SnapshotRef, prompts: Mapping[str, str], out: Path, dtype: Any
) -> dict[str, Any]:
    """Merged weights, checked on the first rows of the set. Raises EvalError where they do not
    agree with base and adapter apart."""
    from tasks.sources.small_model import load_tokenizer
    from tasks.training.adapter import merge_adapter
    from tasks.training.formatting import to_prompt_completion
    from tasks.training.stage import adapter_of

    base = str(trained.open().manifest["base_model"])
    rows = (
        curated.open()
        .read(unique="candidate_id")
        .sort("candidate_id")
        .head(PROBES)
        .iter_rows(named=True)
    )
    examples = to_prompt_completion(
        list(rows), load_tokenizer(base), lambda row: prompts[row["task_id"]]
    )
    check = merge_adapter(
        base, adapter_of(trained), out, [example["completion"] for example in examples], dtype=dtype
    )
    return check.model_dump() | {"relative_difference": check.relative_difference}


def print_trained(data: dict[str, Any]) -> None:
    """The end of a training on a terminal: what it learnt, where the adapter is, how to serve it,
    where MLflow has it."""
    where = "new" if data["new_work"] else "was there already"
    print(
        f"trained on  {data['rows']:,} rows of {data['curated']}"
        + (f", {data['dropped']:,} left out" if data["dropped"] else "")
    )
    print(
        f"loss        {data['loss_first']:.4f} in the first epoch, {data['loss_last']:.4f} in the"
        " last"
    )
    if held_out := list(data["held_out"].values()):
        print(f"held out    {held_out[0]:.4f} at first, {held_out[-1]:.4f} at last")
    print(
        f"adapter     {data['adapter']} (rank {data['rank']}, {data['size_bytes'] / 1e6:,.1f} MB,"
        f" {where})"
    )
    if merged := data.get("merged"):
        share = f"{merged['relative_difference']:.2%} of what the adapter changes"
        print(f"merged      {merged['directory']} ({merged['dtype']}, differs by {share})")
    print(
        f"serve       vllm serve {data['base_model']} --enable-lora --max-lora-rank {data['rank']}"
        f" --lora-modules tuned={data['adapter']}"
    )
    if mlflow := data["mlflow"]:
        print(
            f"MLflow      run {mlflow['run_id']} in {mlflow['experiment']}, model"
            f" {mlflow['model_version']}, at {mlflow['tracking_uri']}"
        )
