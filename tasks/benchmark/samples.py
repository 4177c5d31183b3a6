"""Verdicts in, what scoring needs of them out: per model and task, which samples are right by which
rule, and how fast.

Guarantees: a table that would give wrong numbers in silence (the same candidate twice, verdicts of
two devices, columns missing) is refused with the way out; tasks whose reference fails count for
nobody; models and tasks come in a fixed order. Does not guarantee that the models answered the same
tasks: `missing_tasks` says which they did not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kernels_eval.errors import UsageError
from kernels_eval.records import Json, Reason, Row, Status
from tasks.benchmark.metrics import pass_at_k
from tasks.tables import CORRECT, TASK_ERROR

Track = Literal["any", "custom_kernel"]
TRACKS: tuple[Track, ...] = get_args(Track)
Rule = Literal["concur", "kernelbench_v0", "kernelbench_v0.1"]
RULES: tuple[Rule, ...] = get_args(Rule)
Baseline = Literal["eager", "compile"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)
"""What a speedup is against: the reference as it is, or under torch.compile where verification
timed that too."""
COLUMNS = ("model", "task_id", "status", "reason", "outputs_match", "timing")
RULE_COLUMNS = ("correctness", "custom_kernels")

_TOLERANCE = {"kernelbench_v0": "kernelbench_1e2", "kernelbench_v0.1": "kernelbench_1e4"}
# statuses of candidates whose reference was run
_REACHED = [
    status.value
    for status in Status
    if status not in (Status.COMPILE_ERROR, Status.NO_CODE, Status.REJECTED)
]
# KernelBench's harness compares outputs and nothing else: what ran to the end counts, whatever our
# own gates and checks said of it
_RAN = frozenset({Status.CORRECT, Status.INCORRECT, Status.REJECTED})


class Sample(NamedTuple):
    """One verdict: right per track, and how fast (0 where not timed)."""

    custom: bool
    any: bool
    speedup: float

    def passes(self, track: Track, p: float | None) -> bool:
        """Exec for p None; else correct with speedup > p. Of a correct sample without a timing only
        speedup > 0 is known."""
        right = self.custom if track == "custom_kernel" else self.any
        return right and (not p or self.speedup > p)


Samples = Mapping[str, Sequence[Sample]]


def samples_by_model(
    frame: pl.DataFrame,
    *,
    rule: Rule = "concur",
    count_degenerate: bool = False,
    baseline: Baseline = "eager",
) -> dict[str, dict[str, list[Sample]]]:
    """model -> task_id -> samples; models in order of first appearance, tasks sorted so that
    bootstrap draws pair up between models.

    `frame` has one row per verdict: `COLUMNS`, and for KernelBench's rules `RULE_COLUMNS`; where it
    has `candidate_id` and `device`, these are checked. Rules: "concur" takes the verdict;
    "kernelbench_v0" and "kernelbench_v0.1" take every sample that ran and whose outputs on the
    task's own inputs are within 1e-2 or 1e-4 of the reference (atol = rtol), whatever else
    verification found; on the track "custom_kernel" one that was rejected, or launched no kernel of
    its own, does not count. `count_degenerate` keeps degenerate tasks; what was not judged there is
    not right. With the `baseline` "compile" speedups are those against the compiled reference, and
    the tasks of `uncompiled_tasks` are left out. Raises UsageError for a missing column, a
    candidate that a model has twice, or two devices.
    """
    needed = COLUMNS if rule == "concur" else (*COLUMNS, *RULE_COLUMNS)
    missing = [name for name in needed if name not in frame.columns]
    if missing:
        raise UsageError(
            f"scoring needs the columns {', '.join(missing)}", "join verdicts with a column `model`"
        )
    require_scorable(frame)
    excluded = set(excluded_tasks(frame, count_degenerate=count_degenerate))
    excluded.update(uncompiled_tasks(frame) if baseline == "compile" else ())
    found: dict[str, dict[str, list[Sample]]] = {}
    for row in frame.select(needed).iter_rows(named=True):
        tasks = found.setdefault(row["model"], {})
        if row["task_id"] not in excluded:
            tasks.setdefault(row["task_id"], []).append(_sample(row, rule, baseline))
    return {model: dict(sorted(tasks.items())) for model, tasks in found.items()}


def require_scorable(frame: pl.DataFrame) -> None:
    """Raises UsageError where a model has a candidate twice, or verdicts come from two devices.
    Absent columns are not checked."""
    if "candidate_id" in frame.columns:
        twice = (
            frame.group_by("model", "candidate_id")
            .len()
            .filter(pl.col("len") > 1)
            .sort("model", "candidate_id")
        )
        if twice.height:
            model, candidate, count = twice.row(0)
            raise UsageError(
                f"{twice.height:,} candidates are there more than once, such as {candidate!r} of"
                f" model {model!r} ({count} times): each would be counted as several samples",
                'read snapshots with unique="candidate_id", or drop repeated rows with'
                ' frame.unique(["model", "candidate_id"])',
            )
    if "device" in frame.columns:
        # a verdict without a device never reached one (it did not compile, say): it belongs to
        # whatever its neighbours ran on
        devices = (
            frame.filter(pl.col("device").fill_null("") != "")
            .group_by("device")
            .agg(pl.len(), pl.col("model").unique().sort())
        )
        if devices.height > 1:
            named = "; ".join(
                f"{device} ({count:,} of {', '.join(models)})"
                for device, count, models in devices.sort("device").iter_rows()
            )
            raise UsageError(
                f"verdicts of {devices.height} devices are mixed: {named}. Speedups on different"
                " devices do not compare",
                "score each verification snapshot by itself (its manifest.json names its device),"
                " or verify all candidates on one device",
            )


def excluded_tasks(frame: pl.DataFrame, *, count_degenerate: bool = False) -> list[str]:
    """Tasks whose reference fails or is degenerate for most of the candidates that reached it, of
    all models: no model can be judged on them. Sorted.

    A `task_error` of fewer is a fault of that run: the sample counts as not right, and the task
    stays (`remarks` tells how many). With `count_degenerate` only those whose reference fails.
    """
    broken = TASK_ERROR
    if count_degenerate:
        broken &= (pl.col("reason") != Reason.DEGENERATE_TASK.value).fill_null(True)
    reached = frame.filter(pl.col("status").is_in(_REACHED)).group_by("task_id")
    counts = reached.agg(broken.sum().alias("broken"), pl.len())
    return sorted(counts.filter(2 * pl.col("broken") > pl.col("len"))["task_id"].to_list())


def remarks(frame: pl.DataFrame) -> dict[str, str]:
    """What scoring left out or counts as not right without a verdict on the kernel, a sentence
    each by what it is about; only what there is."""
    excluded, broken = excluded_tasks(frame), frame.filter(TASK_ERROR)
    failed = dict(broken["task_id"].value_counts().iter_rows())
    named = ", ".join(f"{name} ({failed[name]:,} candidates)" for name in excluded)
    alone = {name: count for name, count in sorted(failed.items()) if name not in excluded}
    where = ", ".join(f"{name} ({count:,})" for name, count in alone.items())
    nameless = frame["status"].null_count()
    # the column may be of no struct at all where nothing was timed
    speeds = ((row or {}).get("speedup") for row in frame["timing"].to_list())
    endless = sum(speed is not None and not _is_ratio(speed) for speed in speeds)
    found = {
        "excluded": "Benchmark tasks left out for every model, because their reference fails or is"
        f" degenerate for most candidates that reached it: {named}." * bool(excluded),
        "task_errors": f"The reference failed for {sum(alone.values()):,} candidates of tasks where"
        f" it works for most; they count as not correct: {where}." * bool(alone),
        "without_status": f"{nameless:,} verdicts have no status: they count as not correct."
        * bool(nameless),
        "speedups": f"{endless:,} speedups are infinite, not a number or not above 0: these samples"
        " count as not timed." * bool(endless),
    }
    return {name: said for name, said in found.items() if said}


def within_tokens(frame: pl.DataFrame, limit: int) -> pl.DataFrame:
    """The verdicts as they would be with answers of at most `limit` completion tokens: a longer one
    is no answer. Tasks that scoring leaves out are left out here, by the verdicts as they are."""
    known = frame.filter(~pl.col("task_id").is_in(excluded_tasks(frame)))
    over = (pl.col("completion_tokens") > limit) | TASK_ERROR
    cut: dict[str, str | None] = {"status": Status.NO_CODE, "reason": Reason.TRUNCATED}
    cut |= {name: None for name in ("timing", "outputs_match", "correctness") if name in frame}
    return known.with_columns(
        pl.when(over.fill_null(False)).then(pl.lit(value)).otherwise(pl.col(name)).alias(name)
        for name, value in cut.items()
    )


def unknown_lengths(frame: pl.DataFrame) -> dict[str, int]:
    """model -> how many of its right answers have no token count; models without any are left
    out."""
    right = CORRECT | (pl.col("reason") == Reason.NO_CUSTOM_KERNEL.value)
    rows = frame.filter(right, pl.col("completion_tokens").is_null())
    return dict(rows["model"].value_counts().iter_rows())


def baselines_of(frame: pl.DataFrame) -> tuple[Baseline, ...]:
    """The baselines that these verdicts have times of: always "eager", and "compile" where at least
    one verdict was timed against it."""
    measured = any(compiled.get("speedup") is not None for _, _, compiled in _timed(frame))
    return BASELINES if measured else BASELINES[:1]


def uncompiled_tasks(frame: pl.DataFrame) -> list[str]:
    """Tasks whose compiled reference was asked for and could never be timed (it does not compile,
    say): no model has a speedup against it. Sorted."""
    rows = _timed(frame)
    asked, measured = (
        {task for _, task, compiled in rows if compiled.get(name) is not None}
        for name in ("mode", "speedup")
    )
    return sorted(asked - measured)


def not_compared(frame: pl.DataFrame, model: str) -> int:
    """Timed verdicts of a model that were not asked to be timed against the compiled reference at
    all."""
    return sum(compiled.get("mode") is None for own, _, compiled in _timed(frame) if own == model)


def _timed(frame: pl.DataFrame) -> list[tuple[str, str, Json]]:
    """Model, task and the record of the compiled baseline of each timed verdict. Tables from before
    there was such a record give empty ones."""
    return [
        (model, task, timing.get("compiled") or {})
        for model, task, timing in frame.select("model", "task_id", "timing").iter_rows()
        if timing and timing.get("speedup") is not None
    ]


def missing_tasks(samples: Mapping[str, Samples]) -> dict[str, list[str]]:
    """model -> tasks that some other model of the same frame answered and this one did not. Sorted;
    models without any are left out."""
    every = {task for tasks in samples.values() for task in tasks}
    absent = {model: sorted(every - tasks.keys()) for model, tasks in samples.items()}
    return {model: tasks for model, tasks in absent.items() if tasks}


def rates(samples: Samples, track: Track, p: float | None, k: int) -> NDArray[np.float64] | None:
    """pass@k per task, shape (tasks,); None where `unavailable_reason` has one."""
    if unavailable_reason(samples, k):
        return None
    return np.array(
        [
            pass_at_k(len(group), sum(s.passes(track, p) for s in group), k)
            for group in samples.values()
        ]
    )


def unavailable_reason(samples: Samples, k: int) -> str:
    """Why pass@k cannot be estimated from these samples; empty where it can."""
    if not samples:
        return "no task to score"
    short = [len(group) for group in samples.values() if len(group) < k]
    if not short:
        return ""
    return (
        f"pass@{k} needs {k} samples of each task; {len(short):,} of {len(samples):,} tasks have"
        f" fewer (the least: {min(short)})"
    )


def _is_ratio(speedup: float) -> bool:
    """Whether a speedup is a finite number above 0: any other says nothing of the time."""
    return 0 < speedup < math.inf


def _sample(row: Row, rule: Rule, baseline: Baseline) -> Sample:
    """For "concur" this mirrors Verdict.correct_any, Verdict.correct_custom and Verdict.speedup."""
    timing = row["timing"] or {}
    timing = timing if baseline == "eager" else timing.get("compiled") or {}
    speedup = timing.get("speedup") or 0.0
    speedup = speedup if _is_ratio(speedup) else 0.0
    custom = row["status"] == Status.CORRECT
    if rule == "concur":
        alien = row["reason"] == Reason.NO_CUSTOM_KERNEL and row["outputs_match"] is True
        return Sample(custom, custom or alien, speedup)
    close = row["status"] in _RAN and (row["correctness"] or {}).get(_TOLERANCE[rule]) is True
    own = custom or (row["status"] == Status.INCORRECT and bool(row["custom_kernels"]))
    return Sample(close and own, close, speedup if close else 0.0)
