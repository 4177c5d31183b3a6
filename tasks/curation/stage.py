"""Verdicts in, training set out. Thin: the rules are pure functions in `strategies`."""

from __future__ import annotations

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.records import Json, Status
from tasks.curation.config import CurationConfig
from tasks.curation.flags import counted
from tasks.curation.kernels import EqualKernels, equal_left_out, same_text, with_kernels
from tasks.curation.pool import CUT_OFF, eligible_samples, ends, without_flags
from tasks.curation.strategies import CONCISE_AND_FAST, curate
from tasks.curation.tables import (
    curated_rows,
    deciding_of,
    joined_on_candidate,
    named_tasks,
    texts_of,
)
from tasks.progress import report
from tasks.samples import Samples
from tasks.store import Snapshot, SnapshotRef
from tasks.tables import CORRECT, CURATED
from tasks.versions import CURATION_VERSION

STAGE = "curation"


def joined(verdicts: SnapshotRef, candidates: SnapshotRef) -> pl.DataFrame:
    """Verdicts with their candidates, one row per candidate, texts and all: what scores and reports
    read."""
    return joined_on_candidate(
        verdicts.open().read(unique="candidate_id"), candidates.open().read(unique="candidate_id")
    )


def planned(
    samples: Samples, config: CurationConfig, equal: EqualKernels | None = same_text
) -> Snapshot:
    """The snapshot that `run` with the same arguments fills."""
    above = (
        samples.verdicts,
        samples.candidates,
        samples.tasks,
        samples.workloads,
        samples.flags,
        samples.profiles,
    )
    identity = [config.model_dump(mode="json"), _compared_by(equal)]
    return Snapshot.planned(STAGE, identity, above, CURATION_VERSION)


def _compared_by(equal: EqualKernels | None) -> str:
    return "nothing" if equal is None else "texts" if equal is same_text else "programs"


def run(
    samples: Samples, config: CurationConfig, equal: EqualKernels | None = same_text
) -> SnapshotRef:
    """A finished snapshot of tasks.tables.CURATED, each row labelled with the criterion that took
    it.

    The samples' `workloads` name the operators of tasks whose verdicts name none; the manifest's
    `operators_from` counts the correct samples by where those are from. Their `flags` are the flaws
    of the traces; the manifest's `trace_flags` counts them (`flag_counts`). Their `profiles` say
    what limits correct samples (columns `bottleneck` and `sol_score`). `equal` finds equal
    kernels of a task, of which one is taken; None: all are. The manifest's other counts are those
    of `told_of`. Raises UsageError where nothing is taken, and as `curate` does.
    """
    snapshot = planned(samples, config, equal)
    if snapshot.finished:
        return snapshot.ref
    candidates = samples.candidates.open()
    frame = with_kernels(deciding_of(samples), config, candidates, equal)
    taken = curate(frame, config)
    if taken.is_empty():
        raise nothing_taken(frame, config)
    rows = curated_rows(taken, texts_of(candidates, taken), named_tasks(samples.tasks.open()))
    snapshot.append(rows.iter_rows(named=True), CURATED, key="candidate_id")
    counts = dict(sorted(rows["criterion"].value_counts().iter_rows()))
    summary = ", ".join(f"{name} {count}" for name, count in counts.items())
    report(STAGE, rows.height, rows.height, summary)
    return snapshot.publish(
        config=config,
        rows=rows.height,
        extra={
            "criterion_counts": counts,
            "operators_from": operators_from(frame),
            "trace_flags": flag_counts(frame, taken, config),
            **told_of(frame, taken, config),
        },
    ).ref


def flag_counts(frame: pl.DataFrame, taken: pl.DataFrame, config: CurationConfig) -> Json | None:
    """How many `correct` and how many `taken` samples have each flag of their trace, and how many
    correct ones were `left_out` for one.

    None where no trace was measured. With moved reasoning, `taken` is of the samples' own.
    """
    if "trace_flags" not in frame.columns:
        return None
    correct = frame.filter(CORRECT)
    out = correct.height - correct.filter(without_flags(config)).height
    return {"correct": counted(correct), "taken": counted(taken), "left_out": out}


def told_of(frame: pl.DataFrame, taken: pl.DataFrame, config: CurationConfig) -> Json:
    """What a reader of a training set must know of its choice, as counts.

    `answers_end`: how many correct samples ended in which way (`tasks.curation.pool.ends`), and how
    many were `left_out` since the token limit cut them off. `equal_kernels`: how many samples were
    compared, and those `left_out` for an equal one. `concise_and_fast_tasks`: the tasks of
    criterion a, and those whose only correct sample it took. `without_status`: verdicts that have
    none, which count as not correct.
    """
    endings = ends(frame).filter((frame["status"] == Status.CORRECT.value).fill_null(False))
    counts = {str(name): count for name, count in endings.value_counts().iter_rows()}
    cut = 0 if config.cut_off_answers else sum(counts.get(name, 0) for name in CUT_OFF)
    winners = taken.filter(pl.col("criterion") == CONCISE_AND_FAST).select("candidate_id")
    rivals = eligible_samples(frame, config).join(winners, on="candidate_id", how="semi")["_rivals"]
    return {
        "answers_end": {"correct": dict(sorted(counts.items())), "left_out": cut},
        "equal_kernels": equal_left_out(frame, taken),
        "concise_and_fast_tasks": {"all": len(rivals), "one_correct": int((rivals == 1).sum())},
        "without_status": frame["status"].null_count(),
    }


def operators_from(frame: pl.DataFrame) -> dict[str, int]:
    """How many correct samples have their task's operators from a verdict, from its workload, or
    from nowhere ("unknown")."""
    found = frame.filter(CORRECT)["operators_from"].fill_null("unknown")
    return dict(sorted(found.value_counts().iter_rows()))


def nothing_taken(frame: pl.DataFrame, config: CurationConfig) -> UsageError:
    """The error of an empty training set, with the likeliest fix."""
    correct = frame.filter(CORRECT)
    whole = correct.filter(~ends(correct).is_in(CUT_OFF))
    fix = "lower curation.min_speedup or verify more candidates"
    if correct.height:
        if correct.filter(without_flags(config)).is_empty():
            fix = "every correct one has a trace flag of exclude_flags: exclude fewer"
        elif whole.is_empty() and not config.cut_off_answers:
            fix = "the token limit cut all correct ones off: raise max_tokens"
        elif _only_follow_ups(correct) and not config.later_turns:
            fix = "all correct ones answer follow-ups: curation.later_turns=true takes those too"
    return UsageError(
        f"curation took none of {frame.height} candidates ({correct.height} correct)", fix
    )


def _only_follow_ups(correct: pl.DataFrame) -> bool:
    return "turn" in correct.columns and bool((correct["turn"].fill_null(1) > 1).all())
