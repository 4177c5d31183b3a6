"""Training on a curated snapshot, in the line or alone (`concur train`). Prompts are those of the
set's own line, whatever the profile says."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from prefect import flow

from flows.config import PipelineConfig
from flows.naming import run_name
from flows.runtime.guard import guarding
from flows.track import track, training_run_record
from kernels_eval.errors import UsageError
from kernels_eval.records import Json, Language
from tasks.models import load_tokenizer
from tasks.policy import call_stage
from tasks.publishing.lineage import find_curated, lineage
from tasks.store import SnapshotRef
from tasks.synthesis.prompts import render
from tasks.tracking.stages import base_model_of, held_out_losses
from tasks.training.adapter import check_adapter
from tasks.training.formatting import examples_of
from tasks.training.merge import merge_adapter
from tasks.training.rows import with_prompts
from tasks.training.stage import adapter_of, prompts_of
from tasks.training.step import train

PROBES = 8  # rows on which merged and unmerged weights are compared


def prompts_for(config: PipelineConfig, tasks: SnapshotRef) -> dict[str, str]:
    """By task_id, the prompts that these tasks' candidates answered."""
    return prompts_of(tasks, config.language, render, config.synthesis.hardware)


def train_adapter(config: PipelineConfig, tasks: SnapshotRef, curated: SnapshotRef) -> SnapshotRef:
    """LoRA on the curated set: the prompts are those the candidates answered."""
    return call_stage(train, curated, config.training, prompts_for(config, tasks))


@flow(name="train and track", flow_run_name=run_name("train"))
def train_and_track(
    config: PipelineConfig, tasks: SnapshotRef, curated: SnapshotRef
) -> tuple[SnapshotRef, str | None]:
    """`train_adapter` by itself, and its run in MLflow: None where tracking is off or failed."""
    with guarding(config.root):
        trained = train_adapter(config, tasks, curated)
        return trained, track(training_run_record, config, curated, trained)


def of_line(
    root: str, name: str | None, config: PipelineConfig
) -> tuple[PipelineConfig, SnapshotRef, SnapshotRef]:
    """(configuration, tasks, curated set) of a training on an existing set: a fingerprint under
    `root`, a directory, or the newest. Its line's prompt settings replace the profile's. Raises
    UsageError where one is missing, empty or in several languages."""
    ref = find_curated(root, name)
    line = lineage(ref)
    what = f"the curated set {line.curated.path}"
    if not line.curated.has_column("language"):
        raise UsageError(
            f"{what} is empty", "there is nothing to train on: curate again with lower thresholds"
        )
    languages = sorted(line.curated.read(columns=["language"])["language"].unique().to_list())
    if len(languages) != 1:
        raise UsageError(
            f"{what} holds kernels in {', '.join(languages)}", "curate each language by itself"
        )
    if line.tasks is None:
        raise UsageError(
            f"the tasks of {what} are not under {ref.root}",
            "restore their snapshot, or run again",
        )
    asked = (line.candidates.manifest.get("config") or {}) if line.candidates else {}
    synthesis = config.synthesis.model_copy(update={"hardware": asked.get("hardware")})
    changes = {"root": ref.root, "language": Language(languages[0]), "synthesis": synthesis}
    return config.model_copy(update=changes), line.tasks.ref, ref


def summary_of(config: PipelineConfig, curated: SnapshotRef, trained: SnapshotRef) -> Json:
    snapshot, adapter = trained.open(), adapter_of(trained)
    manifest = snapshot.manifest
    facts = check_adapter(adapter)
    return {
        "curated": curated.fingerprint,
        "training": trained.fingerprint,
        "rows": manifest["rows"],
        "dropped": len(manifest.get("dropped") or ()),
        "loss_first": manifest["loss_first"],
        "loss_last": manifest["loss_last"],
        "held_out": {str(step): loss for step, loss in held_out_losses(snapshot).items()},
        "adapter": str(adapter.absolute()),
        "base_model": base_model_of(config.training, trained),
        "decided": manifest.get("decided") or {},
        "rank": facts.rank,
        "size_bytes": facts.size_bytes,
    }


def merge_trained(
    config: PipelineConfig,
    tasks: SnapshotRef,
    curated: SnapshotRef,
    trained: SnapshotRef,
    out: Path,
    dtype: Literal["bfloat16", "float32"],
) -> Json:
    """Write merged weights, checked on the set's first rows. Raises EvalError where they disagree
    with base plus adapter."""
    prompts = prompts_for(config, tasks)
    base = str(trained.open().manifest["base_model"])
    rows = curated.open().read(unique="candidate_id").sort("candidate_id").head(PROBES)
    examples = examples_of(with_prompts(rows, prompts).to_dicts(), load_tokenizer(base))
    probes = [example.completion for example in examples]
    check = merge_adapter(base, adapter_of(trained), out, probes, dtype=dtype)
    return {
        "directory": str(out.absolute()),
        **check.model_dump(),
        "relative_difference": check.relative_difference,
    }
