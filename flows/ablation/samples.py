"""The samples that an ablation starts from, and what of it is left to do. Writes nothing but the
snapshots of task sources, and does not sample, train or verify.

Guarantees: what is found is finished, and is what a refresh of the same configuration would give.
What is finished is not counted as work, and branches that share a training count once, as soon as
the samples exist; before that, each branch counts as a training of its own, on as many rows as its
size or the tasks allow.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from flows.ablation.branch import finished_answers, finished_branch, planned_training
from flows.ablation.estimate import Work
from flows.ablation.plan import AblationConfig, Plan, branch_pipeline, identity_of
from flows.config import PipelineConfig
from flows.refresh import Samples
from kernels_eval.errors import EvalError, UsageError
from kernels_eval.records import Language, stable_hash
from tasks.curation import flags as flags_stage
from tasks.curation.source import Source
from tasks.curation.stage import planned as planned_curation
from tasks.curation.strategies import curate
from tasks.curation.tables import deciding
from tasks.decontamination import stage as decontamination
from tasks.sources import stage as sources
from tasks.store import Snapshot, SnapshotRef, snapshots
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

if TYPE_CHECKING:
    import polars as pl

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


# -- samples that exist ----------------------------------------------------------------------------


def samples_of(root: str, verdicts: str) -> tuple[Language, Samples]:
    """The samples of a finished verification snapshot, and their language. Raises UsageError where
    it, its candidates or its tasks do not exist."""
    known = {
        found.fingerprint: found for found in snapshots(root, "verification") if found.finished
    }
    matches = [
        found
        for name, found in known.items()
        if name == verdicts or (len(verdicts) >= 6 and name.startswith(verdicts))
    ]
    if len(matches) != 1:
        close = difflib.get_close_matches(verdicts, known, n=1)
        raise UsageError(
            f"there is no finished verification snapshot {verdicts!r} under {root}",
            f"did you mean {close[0]}?" if close else f"there are: {', '.join(known) or 'none'}",
        )
    (found,) = matches
    candidates = _upstream(found, "candidates", "synthesis")
    tasks = _upstream(found, "tasks", "training-tasks", "tasks")
    source = Source(found.path, None, root)
    workloads, flags = source.made_of("workloads", tasks), source.made_of("trace-flags", found)
    return Language(found.manifest["language"]), Samples(
        tasks=tasks.ref,
        candidates=candidates.ref,
        verdicts=found.ref,
        workloads=workloads.ref if workloads else None,
        flags=flags.ref if flags else None,
    )


def _upstream(verdicts: Snapshot, what: str, *stages: str) -> Snapshot:
    for stage in stages:
        for name in verdicts.manifest["upstream"]:
            if (found := Snapshot(verdicts.root, stage, name)).finished:
                return found
    raise UsageError(
        f"the {what} of {verdicts.path} are not under {verdicts.root}",
        "restore their snapshot, or leave verdicts out: then the data set is refreshed",
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
    if not (candidates.finished and workloads.finished):
        return None
    verdicts = Verification(
        candidates.ref, tasks, pipeline.verification, pipeline.language
    ).snapshot
    if not verdicts.finished:
        return None
    flags = flags_stage.planned(verdicts.ref, candidates.ref, pipeline.quality)
    if not flags.finished:
        return None
    return Samples(
        tasks=tasks,
        candidates=candidates.ref,
        verdicts=verdicts.ref,
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


def rows_by_branch(samples: Samples, plans: Sequence[Plan]) -> dict[str, tuple[int, str]]:
    """How many rows each branch's curation would take, and a hash of which: those with one hash and
    one seed share a training. Branches whose curation fails are left out. Writes nothing."""
    frame = deciding(
        samples.verdicts.open(),
        samples.candidates.open(),
        samples.workloads.open() if samples.workloads else None,
        samples.flags.open() if samples.flags else None,
    )
    found = {}
    for plan in plans:
        try:
            taken = curate(frame, plan.curation)
        except EvalError:
            continue
        if taken.height:
            found[plan.name] = taken.height, _hash_of(taken)
    return found


def _hash_of(taken: pl.DataFrame) -> str:
    """Of the candidates, and of the candidate that each one's reasoning was moved from."""
    ids = taken["candidate_id"].to_list()
    moved = (
        taken["reasoning_from"].to_list()
        if "reasoning_from" in taken.columns
        else [None] * taken.height
    )
    return stable_hash(sorted(zip(ids, map(str, moved), strict=True)))


def content_of(curated: SnapshotRef) -> str:
    """A hash of what training reads of a curated set: equal for two sets of the same rows, in
    whatever order and by whatever rule."""
    frame = curated.open().read(unique="candidate_id").drop("criterion", strict=False)
    return stable_hash(
        [stable_hash(row) for row in frame.sort("candidate_id").iter_rows(named=True)]
    )


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
    shared = {
        "shared_answers": answers * len(missing),
        "sampled_shared": answers * sum(model != "recorded" for model in missing),
        "suite": suite_tasks,
    }
    if samples is None:
        synthesis = pipeline.synthesis
        candidates = tasks * synthesis.samples_per_task * synthesis.turns
        rows = tuple(float(min(plan.size or tasks, candidates)) for plan in plans)
        return Work(
            branches=len(plans),
            rows=rows,
            rows_basis=f"at most {max(rows):,.0f} rows each, one of a task, assumed",
            answered=len(plans),
            candidates=candidates,
            sampled=candidates if synthesis.sampler in ("vllm", "transformers") else 0,
            **shared,
        )
    known = rows_by_branch(samples, plans)
    units: dict[tuple[str, int], list[Plan]] = {}
    for plan in plans:
        if plan.name in known:
            units.setdefault((known[plan.name][1], plan.seed), []).append(plan)
    left = {
        members[0].name: (members, state)
        for members in units.values()
        if (state := _state(pipeline, members, samples, suite)) != "done"
    }
    rows = tuple(float(known[name][0]) for name, (_, state) in left.items() if state == "open")
    return Work(
        branches=sum(len(members) for members, _ in left.values()),
        rows=rows,
        rows_basis=f"{sum(rows):,.0f} rows, counted",
        answered=len(left),
        candidates=0,
        sampled=0,
        **shared,
    )


def _state(
    pipeline: PipelineConfig, members: Sequence[Plan], samples: Samples, suite: SnapshotRef
) -> Literal["done", "trained", "open"]:
    """How far branches are that share a training."""
    own = branch_pipeline(pipeline, members[0])
    made = (samples.verdicts, samples.candidates, samples.tasks)
    sets = [
        planned_curation(*made, plan.curation, samples.workloads, samples.flags).ref
        for plan in members
    ]
    if any(finished_branch(own, samples.tasks, curated, suite) for curated in sets):
        return "done"
    trained = any(planned_training(own, samples.tasks, curated).finished for curated in sets)
    return "trained" if trained else "open"


def fingerprint_of(
    config: AblationConfig,
    pipeline: PipelineConfig,
    plans: tuple[Plan, ...],
    samples: Samples,
    suite: SnapshotRef,
) -> str:
    """What makes two calls the same ablation: configuration, samples, benchmark and versions."""
    made_of = [ref.fingerprint for ref in (*(ref for _, ref in samples if ref), suite)]
    identity = identity_of(config, pipeline, plans)
    return stable_hash(["ablations", identity, made_of, DECIDING])
