"""The samples that an ablation starts from, and what of it is left to do. Writes nothing but the
snapshots of task sources, and does not sample, train or verify.

Guarantees: what is found is finished, and is what a refresh of the same configuration would give.
What is finished is not counted as work, and branches that share a training count once, as soon as
the samples exist; before that, each branch counts as a training of its own, on as many rows as its
size or the tasks allow.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from flows.ablation.branch import finished_answers, finished_branch, planned_training
from flows.ablation.estimate import Work
from flows.ablation.plan import Plan, branch_pipeline
from flows.config import PipelineConfig
from kernels_eval.errors import EvalError, UsageError
from kernels_eval.records import Language, stable_hash
from tasks.curation import flags as flags_stage
from tasks.curation.kernels import with_kernels
from tasks.curation.source import Source
from tasks.curation.stage import planned as planned_curation
from tasks.curation.strategies import curate
from tasks.curation.tables import deciding_of
from tasks.decontamination import stage as decontamination
from tasks.decontamination.deduplication import equal_kernels
from tasks.samples import Samples
from tasks.sources import stage as sources
from tasks.store import SnapshotRef
from tasks.store.lookup import find_snapshot
from tasks.synthesis.stage import Synthesis
from tasks.verification.stage import Verification
from tasks.versions import (
    CURATION_VERSION,
    PARSER_VERSION,
    SCORING_VERSION,
    SYNTHESIS_VERSION,
    TRACE_FLAG_VERSION,
    TRAINING_VERSION,
)
from tasks.workload import stage as workload_stage

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
MOVED = "reasoning_from"


# -- samples that exist ----------------------------------------------------------------------------


def samples_of(root: str, verdicts: str) -> tuple[Language, Samples]:
    """The samples of a finished verification snapshot, by (the beginning of) its fingerprint, and
    their language. Raises UsageError where it, its candidates or its tasks do not exist."""
    found = find_snapshot(root, verdicts, "verification").open()
    source = Source(found.path, None, root)
    if source.tasks is None:
        raise UsageError(
            f"the tasks of {found.path} are not under {root}",
            "restore their snapshot, or omit --verdicts to refresh the data set first",
        )
    workloads = source.made_of("workloads", source.tasks)
    flags = source.made_of("trace-flags", found)
    return Language(found.manifest["language"]), Samples(
        tasks=source.tasks.ref,
        candidates=source.candidates.ref,
        verdicts=found.ref,
        workloads=workloads and workloads.ref,
        flags=flags and flags.ref,
    )


def finished_samples(pipeline: PipelineConfig) -> Samples | None:
    """What a refresh of this configuration would return at once; None where it would have anything
    to do."""
    tasks = finished_tasks(pipeline)
    # what later turns ask depends on verdicts: the flow finds that out
    if tasks is None or pipeline.synthesis.turns > 1:
        return None
    workloads = workload_stage.planned(tasks, pipeline.workload)
    candidates = Synthesis(tasks, pipeline.synthesis, pipeline.language).snapshot
    judged = Verification(candidates.ref, tasks, pipeline.verification, pipeline.language).snapshot
    flags = flags_stage.planned(judged.ref, candidates.ref, pipeline.quality)
    if not all(each.finished for each in (workloads, candidates, judged, flags)):
        return None
    return Samples(
        tasks=tasks,
        candidates=candidates.ref,
        verdicts=judged.ref,
        workloads=workloads.ref,
        flags=flags.ref,
    )


def finished_tasks(pipeline: PipelineConfig) -> SnapshotRef | None:
    """The training tasks where they are chosen already. Reads the sources, which may be a hub."""
    source = sources.run(pipeline.tasks, pipeline.root)
    enabled = pipeline.decontamination.enabled
    benchmark = sources.run(pipeline.known_tasks, pipeline.root) if enabled else None
    chosen = decontamination.planned(
        source, benchmark, pipeline.decontamination, pipeline.deduplication
    )
    return chosen.ref if chosen.finished else None


# -- branches that share a training ----------------------------------------------------------------


def unit_of(taken: pl.DataFrame, plan: Plan) -> tuple[str, int]:
    """What branches share a training by: the candidates taken, the candidate that each one's
    reasoning was moved from, and the seed."""
    moved = taken[MOVED] if MOVED in taken.columns else pl.repeat(None, taken.height, eager=True)
    rows = zip(taken["candidate_id"], map(str, moved), strict=True)
    return stable_hash(sorted(rows)), plan.seed


def unit_of_set(curated: SnapshotRef, plan: Plan) -> tuple[str, int]:
    """The same of a curated set that is written."""
    columns = ["candidate_id", MOVED]
    return unit_of(curated.open().read(columns=columns, unique="candidate_id"), plan)


# -- what is left to do ----------------------------------------------------------------------------


def work_left(
    pipeline: PipelineConfig,
    plans: tuple[Plan, ...],
    samples: Samples | None,
    suite: SnapshotRef,
    tasks: int,
) -> Work:
    """`samples` is None where they are still to be made of `tasks` tasks."""
    suite_tasks = suite.open().manifest["rows"]
    answers = suite_tasks * pipeline.benchmark.samples_per_task
    missing = [
        model
        for model in pipeline.benchmark.models
        if model != "tuned" and finished_answers(pipeline, suite, model) is None
    ]
    work = Work(
        suite=suite_tasks,
        shared_answers=answers * len(missing),
        sampled_shared=answers * sum(model != "recorded" for model in missing),
    )
    if samples is None:
        synthesis = pipeline.synthesis
        candidates = tasks * synthesis.samples_per_task * synthesis.turns
        rows = tuple(float(min(plan.size or tasks, candidates)) for plan in plans)
        return work._replace(
            branches=len(plans),
            rows=rows,
            rows_basis=f"at most {max(rows):,.0f} rows each, one of a task, assumed",
            answered=len(plans),
            candidates=candidates,
            sampled=candidates if synthesis.sampler in ("vllm", "transformers") else 0,
        )
    units: dict[tuple[str, int], list[Plan]] = {}
    heights: dict[tuple[str, int], int] = {}
    judged = samples.candidates.open()
    frame = deciding_of(samples)
    equal = equal_kernels(pipeline.deduplication)
    for plan in plans:
        try:
            known = with_kernels(frame, plan.curation, judged, equal)
            taken = curate(known, plan.curation)
        except EvalError:  # the branch will fail, and costs nothing
            continue
        if taken.height:
            unit = unit_of(taken, plan)
            heights[unit] = taken.height
            units.setdefault(unit, []).append(plan)
    trainings, branches, answered = [], 0, 0
    for unit, members in units.items():
        trained, done = _progress(pipeline, members, samples, suite)
        if not done:
            answered, branches = answered + 1, branches + len(members)
            trainings += [] if trained else [float(heights[unit])]
    return work._replace(
        branches=branches,
        rows=tuple(trainings),
        rows_basis=f"{sum(trainings):,.0f} rows, counted",
        answered=answered,
    )


def _progress(
    pipeline: PipelineConfig, members: Sequence[Plan], samples: Samples, suite: SnapshotRef
) -> tuple[bool, bool]:
    """Whether branches that share a training are trained, and whether they are done."""
    own = branch_pipeline(pipeline, members[0])
    equal = equal_kernels(pipeline.deduplication)
    sets = [planned_curation(samples, plan.curation, equal).ref for plan in members]
    sets = [curated for curated in sets if curated.open().finished]
    trained = any(planned_training(own, samples.tasks, curated).finished for curated in sets)
    return trained, any(finished_branch(own, samples.tasks, each, suite) for each in sets)


def fingerprint_of(
    pipeline: PipelineConfig, plans: tuple[Plan, ...], samples: Samples, suite: SnapshotRef
) -> str:
    """What makes two calls the same ablation: configuration, samples, benchmark and versions; not
    where it lies, not its budget, not how wide it runs."""
    decides = pipeline.model_dump(mode="json", include={"language", "training", "benchmark"})
    decides["deduplication"] = pipeline.deduplication.enabled
    decides["synthesis"] = [
        pipeline.synthesis.sampler == "vllm",
        pipeline.synthesis.hardware,
        pipeline.synthesis.server.identity,
    ]
    decides["eval"] = pipeline.verification.eval.model_dump(mode="json")
    branches = [[plan.name, plan.curation.model_dump(mode="json")] for plan in plans]
    made_of = [ref.fingerprint for ref in (*(ref for _, ref in samples if ref), suite)]
    identity = [pipeline.name, decides, branches]
    return stable_hash(["ablations", identity, made_of, DECIDING])
