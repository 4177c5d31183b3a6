"""The samples that an ablation starts from: those of verdicts that are there, or of a refresh that
is finished already. Reads; writes nothing but the snapshots of task sources.

Guarantees: what is found is finished, and is what a refresh of the same configuration would give
back. Does not verify or sample anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flows.ablation.plan import Plan, nearest
from flows.config import PipelineConfig
from kernels_eval.errors import EvalError, UsageError
from kernels_eval.records import Language, stable_hash
from tasks.curation.source import Source
from tasks.store.snapshot import Snapshot, SnapshotRef, snapshots

if TYPE_CHECKING:
    from flows.refresh import Samples

WITHOUT = ("criterion",)
"""Columns of a training set that training does not read: which rule took a row."""


def samples_of(root: str, verdicts: str) -> tuple[Language, Samples]:
    """The samples of a finished verification snapshot, and their language. Raises UsageError where
    it, its candidates or its tasks are not there."""
    from flows.refresh import Samples

    known = {
        found.fingerprint: found for found in snapshots(root, "verification") if found.finished
    }
    matches = [
        found
        for name, found in known.items()
        if name == verdicts or (len(verdicts) >= 6 and name.startswith(verdicts))
    ]
    if len(matches) != 1:
        raise UsageError(
            f"there is no finished verification snapshot {verdicts!r} under {root}",
            nearest(verdicts, sorted(known)),
        )
    (found,) = matches
    upstream = found.manifest["upstream"]
    candidates = _there(root, ("synthesis",), upstream, f"the candidates of {found.path}")
    tasks = _there(root, ("training-tasks", "tasks"), upstream, f"the tasks of {found.path}")
    source = Source(found.path, None, root)
    workloads, flags = source.made_of("workloads", tasks), source.made_of("trace-flags", found)
    made = {
        "workloads": workloads.ref if workloads else None,
        "flags": flags.ref if flags else None,
    }
    return Language(found.manifest["language"]), Samples(
        tasks=tasks.ref, candidates=candidates.ref, verdicts=found.ref, **made
    )


def _there(root: str, stages: tuple[str, ...], upstream: list[str], what: str) -> Snapshot:
    for stage in stages:
        for name in upstream:
            if (found := Snapshot(root, stage, name)).finished:
                return found
    raise UsageError(
        f"{what} are not under {root}",
        "restore their snapshot, or leave verdicts out: then the data set is refreshed",
    )


def finished_samples(pipeline: PipelineConfig) -> Samples | None:
    """What a refresh of this configuration would only give back; None where it would have anything
    to do."""
    from flows.refresh import Samples
    from tasks.curation import flags as flags_stage
    from tasks.synthesis.stage import Synthesis
    from tasks.verification.stage import Verification
    from tasks.workload import stage as workload_stage

    tasks = finished_tasks(pipeline)
    if (
        tasks is None or pipeline.synthesis.turns > 1
    ):  # what later turns ask depends on verdicts: the flow finds out
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
    made = {
        "candidates": candidates.ref,
        "verdicts": verdicts.ref,
        "workloads": workloads.ref,
        "flags": flags.ref,
    }
    return Samples(tasks=tasks, **made) if flags.finished else None


def finished_tasks(pipeline: PipelineConfig) -> SnapshotRef | None:
    """The training tasks where they are chosen already. Reads the sources, which may be a hub."""
    from tasks.decontamination import stage as choice
    from tasks.sources import stage as sources

    source = sources.run(pipeline.tasks, pipeline.root)
    benchmark = (
        sources.run(pipeline.known_tasks, pipeline.root)
        if pipeline.decontamination.enabled
        else None
    )
    chosen = choice.planned(source, benchmark, pipeline.decontamination, pipeline.deduplication)
    return chosen.ref if chosen.finished else None


def rows_by_branch(samples: Samples, plans: tuple[Plan, ...]) -> dict[str, tuple[int, str]]:
    """How many rows each branch's curation would take, and a hash of which: those with one hash and
    one seed share a training. Branches whose curation fails are left out. Writes nothing."""
    from tasks.curation.strategies import curate
    from tasks.curation.tables import deciding

    opened = [
        ref.open() if ref else None
        for ref in (samples.verdicts, samples.candidates, samples.workloads, samples.flags)
    ]
    frame = deciding(*opened)  # type: ignore[arg-type]
    found = {}
    for plan in plans:
        try:
            taken = curate(frame, plan.curation)
        except EvalError:
            continue
        if taken.height:
            moved = (
                taken["reasoning_from"].to_list()
                if "reasoning_from" in taken.columns
                else [None] * taken.height
            )
            found[plan.name] = (
                taken.height,
                stable_hash(
                    sorted(zip(taken["candidate_id"].to_list(), map(str, moved), strict=True))
                ),
            )
    return found


def content_of(curated: SnapshotRef) -> str:
    """A hash of what training reads of a curated set: two sets of the same rows have one, in
    whatever order and by whatever rule."""
    frame = (
        curated.open().read(unique="candidate_id").drop(WITHOUT, strict=False).sort("candidate_id")
    )
    return stable_hash([stable_hash(row) for row in frame.iter_rows(named=True)])
