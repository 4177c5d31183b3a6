"""Samples of an ablation, and its identity."""

from __future__ import annotations

from collections.abc import Sequence

from flows.ablation.plan import Plan
from flows.config import PipelineConfig
from kernels_eval.errors import UsageError
from kernels_eval.records import Language, stable_hash
from kernels_eval.versions import PROTOCOL_VERSION
from tasks.curation.source import Source
from tasks.samples import Samples
from tasks.store import Snapshot, SnapshotRef
from tasks.store.lookup import find_snapshot
from tasks.verification.stage import conditions_of
from tasks.versions import (
    CURATION_VERSION,
    PARSER_VERSION,
    SCORING_VERSION,
    SYNTHESIS_VERSION,
    TRACE_FLAG_VERSION,
    TRAINING_VERSION,
)

DECIDING = (
    PROTOCOL_VERSION,
    SYNTHESIS_VERSION,
    PARSER_VERSION,
    TRACE_FLAG_VERSION,
    CURATION_VERSION,
    TRAINING_VERSION,
    SCORING_VERSION,
)
"""Versions of what decides a branch's results: a change makes another ablation of the same
configuration."""


def samples_of(root: str, verdicts: str) -> tuple[Language, Samples]:
    """Samples of a finished verification snapshot, by (the beginning of) its fingerprint, and their
    language. Raises UsageError where one is missing."""
    found = find_snapshot(root, verdicts, "verification").open()
    source = Source(found.path, None, root)
    if source.tasks is None:
        raise UsageError(
            f"the tasks of {found.path} are not under {root}",
            "restore their snapshot, or omit --verdicts to refresh the data set first",
        )

    def made_of(stage: str, *above: Snapshot) -> SnapshotRef | None:
        made = source.made_of(stage, *above)
        return made.ref if made else None

    return Language(found.manifest["language"]), Samples(
        tasks=source.tasks.ref,
        candidates=source.candidates.ref,
        verdicts=found.ref,
        workloads=made_of("workloads", source.tasks),
        flags=made_of("trace-flags", found),
        profiles=made_of("kernel-profiles", found),
    )


def fingerprint_of(
    pipeline: PipelineConfig, plans: Sequence[Plan], samples: Samples, suite: SnapshotRef
) -> str:
    """Identity of an ablation: configuration, samples, benchmark, device and versions; neither
    place nor parallelism."""
    decides = pipeline.model_dump(mode="json", include={"language", "training", "benchmark"})
    decides["deduplication"] = pipeline.deduplication.enabled
    decides["synthesis"] = [
        pipeline.synthesis.sampler == "vllm",
        pipeline.synthesis.hardware,
        pipeline.synthesis.server.args,
    ]
    decides["verification"] = pipeline.verification.model_dump(
        mode="json", include={"eval", "screen"}
    )
    branches = [[plan.name, plan.curation.model_dump(mode="json")] for plan in plans]
    upstream = [ref.fingerprint for ref in (*samples.snapshots.values(), suite)]
    device = conditions_of(pipeline.language, pipeline.verification).model_dump(mode="json")
    return stable_hash(["ablation", pipeline.name, decides, branches, upstream, device, DECIDING])
