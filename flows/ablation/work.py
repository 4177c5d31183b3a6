"""What of an ablation is left to do, found out without doing any of it: what an estimate is made
of.

Guarantees: what is finished is not counted, and branches that share a training count once, as soon
as the samples are there. Before that, each branch counts as a training of its own, on as many rows
as its size or the tasks allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flows.ablation.estimate import Work
from flows.ablation.plan import AblationConfig, Plan, branch_pipeline, identity_of
from flows.ablation.samples import rows_by_branch
from flows.config import PipelineConfig
from kernels_eval.records import stable_hash
from tasks.store import SnapshotRef
from tasks.versions import (
    CURATION_VERSION,
    PARSER_VERSION,
    SCORING_VERSION,
    SYNTHESIS_VERSION,
    TRACE_FLAG_VERSION,
    TRAINING_VERSION,
)

if TYPE_CHECKING:
    from flows.refresh import Samples

DECIDING = (
    SYNTHESIS_VERSION,
    PARSER_VERSION,
    TRACE_FLAG_VERSION,
    CURATION_VERSION,
    TRAINING_VERSION,
    SCORING_VERSION,
)
"""Versions of what decides a branch's results: after a change the same configuration is another
ablation."""


def work_left(
    pipeline: PipelineConfig,
    plans: tuple[Plan, ...],
    samples: Samples | None,
    suite: SnapshotRef,
    tasks: int,
) -> Work:
    """`samples` None where they are still to be made of `tasks` tasks."""
    answers = suite.open().manifest["rows"] * pipeline.benchmark.samples_per_task
    missing = missing_references(pipeline, suite)
    shared = {
        "shared_answers": answers * len(missing),
        "sampled_shared": answers * sum(model != "recorded" for model in missing),
    }
    shared["suite"] = suite.open().manifest["rows"]
    if samples is None:
        candidates = tasks * pipeline.synthesis.samples_per_task * pipeline.synthesis.turns
        rows = tuple(float(min(plan.size or tasks, candidates)) for plan in plans)
        served = candidates if pipeline.synthesis.sampler in ("vllm", "transformers") else 0
        basis = f"at most {max(rows):,.0f} rows each, one of a task, assumed"
        return Work(
            len(plans), rows, basis, len(plans), candidates=candidates, sampled=served, **shared
        )
    left = [
        members
        for members in trainings(pipeline, plans, samples).values()
        if not _answered(pipeline, members, samples, suite)
    ]
    untrained = [members for members in left if not _trained(pipeline, members, samples)]
    known = rows_by_branch(samples, tuple(members[0] for members in untrained))
    rows = tuple(float(known[members[0].name][0]) for members in untrained)
    return Work(
        sum(map(len, left)),
        rows,
        f"{sum(rows):,.0f} rows, counted",
        len(left),
        candidates=0,
        sampled=0,
        **shared,
    )


def missing_references(pipeline: PipelineConfig, suite: SnapshotRef) -> list[str]:
    """Models beside the tuned ones whose verified answers are not there yet."""
    from flows.ablation.branch import finished_answers

    return [
        model
        for model in pipeline.benchmark.models
        if model != "tuned" and finished_answers(pipeline, suite, model) is None
    ]


def trainings(
    pipeline: PipelineConfig, plans: Sequence[Plan], samples: Samples
) -> dict[tuple[str, int], list[Plan]]:
    """Branches by the training they need: those of the same rows and the same seed. Branches that
    have no rows are left out."""
    known = rows_by_branch(samples, tuple(plans))
    found: dict[tuple[str, int], list[Plan]] = {}
    for plan in plans:
        if plan.name in known:
            found.setdefault((known[plan.name][1], plan.seed), []).append(plan)
    return found


def _sets(members: Sequence[Plan], samples: Samples) -> list[SnapshotRef]:
    """The curated snapshots of these branches, finished or not."""
    from tasks.curation.stage import planned

    made = (samples.verdicts, samples.candidates, samples.tasks)
    return [planned(*made, plan.curation, samples.workloads, samples.flags).ref for plan in members]


def _answered(
    pipeline: PipelineConfig, members: Sequence[Plan], samples: Samples, suite: SnapshotRef
) -> bool:
    from flows.ablation.branch import finished_branch

    own = branch_pipeline(pipeline, members[0])
    return any(
        finished_branch(own, samples.tasks, curated, suite) for curated in _sets(members, samples)
    )


def _trained(pipeline: PipelineConfig, members: Sequence[Plan], samples: Samples) -> bool:
    from tasks.synthesis.prompts import render
    from tasks.training.stage import planned, prompts_of

    own = branch_pipeline(pipeline, members[0])
    prompts = prompts_of(samples.tasks, own.language, render, own.synthesis.hardware)
    return any(
        planned(curated, own.training, prompts).finished for curated in _sets(members, samples)
    )


def fingerprint_of(
    config: AblationConfig,
    pipeline: PipelineConfig,
    plans: tuple[Plan, ...],
    samples: Samples,
    suite: SnapshotRef,
) -> str:
    made_of = [ref.fingerprint for ref in (*(ref for _, ref in samples if ref), suite)]
    return stable_hash(["ablations", identity_of(config, pipeline, plans), made_of, DECIDING])
