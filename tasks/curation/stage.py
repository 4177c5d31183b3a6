"""Verdicts in, a training set and every candidate's decision out, by the pure rules of
`strategies`."""

from __future__ import annotations

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.records import Json
from tasks.curation.config import CurationConfig
from tasks.curation.decisions import Decided, decide
from tasks.curation.flags import counted
from tasks.curation.kernels import EqualKernels, same_text, with_kernels
from tasks.curation.reasons import WhyNot, left_out
from tasks.curation.strategies import CONCISE_AND_FAST, SHORTEST_INSTEAD
from tasks.curation.tables import (
    curated_rows,
    deciding_of,
    named_tasks,
    texts_of,
)
from tasks.progress import caution, report
from tasks.reporting.text import plural
from tasks.samples import Samples
from tasks.store import Snapshot, SnapshotRef
from tasks.tables import CORRECT, CURATED, unconfirmed
from tasks.versions import CURATION_VERSION

STAGE = "curation"
INSTEAD = (
    "no sample is both the shortest and the fastest of its task or fast enough by itself: took the"
    " shortest correct, timed sample of each task instead"
)
"""What is said of a set of `strategies.concur` of which its criteria take none."""
DECISIONS_TABLE = "decisions"
"""The table beside the curated rows: tasks.tables.DECISIONS of all candidates."""
TAKE_SHORTEST = (
    "to take the shortest correct sample of each task instead: --set curation.if_empty=shortest"
)
FIXES = {
    WhyNot.TRACE_FLAG: "every correct one has a trace flag of exclude_flags: exclude fewer",
    WhyNot.KERNEL_SHARE: (
        "the own kernels of every correct one take less than curation.min_kernel_share: lower it"
    ),
    WhyNot.CUT_OFF: "the token limit cut all correct ones off: raise max_tokens",
    WhyNot.LATER_TURN: (
        "all correct ones answer follow-ups: curation.later_turns=true takes those too"
    ),
    WhyNot.SPEEDUP_BOUND: (
        "lower curation.require_speedup_lower_above, or leave it out to take slower ones too"
    ),
}
"""What to do where every correct candidate is left out for one reason."""


def planned(
    samples: Samples, config: CurationConfig, equal: EqualKernels | None = same_text
) -> Snapshot:
    above = (
        samples.verdicts,
        samples.candidates,
        samples.tasks,
        samples.workloads,
        samples.flags,
        samples.profiles,
    )
    identity = [config.model_dump(mode="json"), compared_by(equal)]
    return Snapshot.planned(STAGE, identity, above, CURATION_VERSION)


def compared_by(equal: EqualKernels | None) -> str:
    return "nothing" if equal is None else "texts" if equal is same_text else "programs"


def run(
    samples: Samples, config: CurationConfig, equal: EqualKernels | None = same_text
) -> SnapshotRef:
    """A finished snapshot of tasks.tables.CURATED, with each row's criterion, and of DECISIONS
    (`decisions_of`).

    `workloads` name operators that verdicts do not, `flags` flaws of traces, `profiles` limits of
    correct samples. One of `equal` kernels of a task is taken (None: all). The manifest has
    `summary`. Raises UsageError where nothing is taken, and as `decide` does.
    """
    snapshot = planned(samples, config, equal)
    if snapshot.finished:
        return snapshot.ref
    candidates = samples.candidates.open()
    frame = with_kernels(deciding_of(samples), config, candidates, equal)
    decided = decide(frame, config)
    taken = decided.taken
    if taken.is_empty():
        raise nothing_taken(decided.decisions, config)
    rows = curated_rows(taken, texts_of(candidates, taken), named_tasks(samples.tasks.open()))
    snapshot.append(rows.iter_rows(named=True), CURATED, key="candidate_id")
    snapshot.write_table(DECISIONS_TABLE, decided.decisions)
    counts = summary(frame, decided)
    _caution(counts | {"rows": rows.height})
    taken_by = ", ".join(f"{name} {count}" for name, count in counts["criterion_counts"].items())
    report(STAGE, rows.height, rows.height, taken_by)
    return snapshot.publish(config=config, rows=rows.height, extra=counts).ref


def _caution(manifest: Json) -> None:
    """Say what to know about a set."""
    caution_unconfirmed(manifest["unconfirmed"], manifest["rows"])
    if manifest.get("instead"):
        caution(manifest["instead"])
    if slower := manifest["slower"]:
        caution(f"{slower}: --set curation.require_speedup_lower_above=1 takes none such")


def decisions_of(curated: Snapshot) -> pl.DataFrame:
    """Decisions on all candidates of a training set. Raises UsageError where they are missing."""
    return curated.read_table(DECISIONS_TABLE)


def summary(frame: pl.DataFrame, decided: Decided) -> Json:
    """Counts of a training set's choice.

    `kept`: how many of the correct ones were taken, and why not the others, in words. `instead`:
    what was taken because the paper's rule takes none, else "". `slower`: those that are slower
    than their reference, "" without any. `criterion_counts`: samples by
    criterion. `why_not`: others by reason. `operators_from`: correct samples by source of
    operators. `trace_flags`: correct and taken samples by flag, None: unmeasured.
    `unconfirmed`: taken samples only screened. `answers_end`: correct samples by end of answer.
    `equal_kernels`: samples compared, and left out. `concise_and_fast_tasks`: tasks of (a), and
    those with one correct sample. `without_status`: verdicts without one.
    """
    decisions = decided.decisions
    correct = frame.filter(CORRECT)
    why_not = _counts(decisions, "why_not")
    winners = decisions.filter(pl.col("taken"), criterion=CONCISE_AND_FAST)["correct_in_task"]
    criteria = _counts(decisions.filter("taken"), "criterion")
    why = left_out(_counts(decisions.filter(CORRECT), "why_not"))
    flags = None
    if "trace_flags" in frame.columns:
        flags = {
            "correct": counted(correct),
            "taken": counted(decided.taken),
            "left_out": why_not.get(WhyNot.TRACE_FLAG, 0),
        }
    return {
        "kept": "; ".join([f"kept {decided.taken.height:,} of {correct.height:,} correct", *why]),
        "instead": INSTEAD if SHORTEST_INSTEAD in criteria else "",
        "slower": slower_ones(decisions.filter("taken")["speedup"]),
        "criterion_counts": criteria,
        "why_not": why_not,
        "operators_from": operators_from(frame),
        "trace_flags": flags,
        "answers_end": {
            "correct": _counts(decisions.filter(CORRECT), "ended"),
            "left_out": why_not.get(WhyNot.CUT_OFF, 0),
        },
        "equal_kernels": {
            "compared": frame["kernel"].count() if "kernel" in frame.columns else 0,
            "left_out": decisions["equals"].count(),
        },
        "concise_and_fast_tasks": {"all": len(winners), "one_correct": int((winners == 1).sum())},
        "without_status": frame["status"].null_count(),
        "unconfirmed": decided.taken.filter(unconfirmed(decided.taken)).height,
    }


def slower_ones(speedups: pl.Series) -> str:
    """How many of the samples of a set are slower than their reference, and the slowest."""
    slower = speedups.filter((speedups > 0) & (speedups < 1)).to_list()
    if not slower:
        return ""
    return (
        f"{len(slower):,} of {plural(len(speedups), 'kept sample')}"
        f" {'is' if len(slower) == 1 else 'are'} slower than the reference, down to"
        f" {min(slower):.2g} times its speed"
    )


def caution_unconfirmed(count: int, taken: int, of: str = "") -> None:
    if count:
        caution(
            f"{count:,} of {taken:,} samples{of} were only screened: `run --only refresh` with"
            " `--set curation.strategy=NAME` confirms what that strategy takes"
        )


def operators_from(frame: pl.DataFrame) -> dict[str, int]:
    """Correct samples by the source of their operators: verdict, workload or "unknown"."""
    correct = frame.filter(CORRECT).with_columns(pl.col("operators_from").fill_null("unknown"))
    return _counts(correct, "operators_from")


def nothing_taken(decisions: pl.DataFrame, config: CurationConfig) -> UsageError:
    correct = decisions.filter(CORRECT)
    found = f"curation took none of {plural(decisions.height, 'candidate')}"
    if correct.is_empty():
        return UsageError(f"{found}: none is correct", "see `concur view`, or verify more")
    reasons = _counts(correct, "why_not")
    fix = FIXES.get(WhyNot(*reasons)) if len(reasons) == 1 else None
    speedups = correct["speedup"].drop_nulls().to_list()
    fastest = f"{max(speedups, default=0.0):.3g}"
    speed = f", at most {fastest} times as fast as the reference" if speedups else ""
    may_take_shortest = bool(speedups) and config.if_empty == "error"
    return UsageError(
        "; ".join([f"{found}: {correct.height:,} correct{speed}", *left_out(reasons)]),
        fix or (TAKE_SHORTEST if may_take_shortest else "verify more candidates"),
    )


def _counts(rows: pl.DataFrame, column: str) -> dict[str, int]:
    return dict(sorted(rows[column].drop_nulls().value_counts().iter_rows()))
