"""Scores of models on a benchmark: Exec and fast_p at pass@k, geometric-mean speedup and its
spread, each with an interval over tasks.

Guarantees: both tracks for every model ("custom_kernel": a custom kernel does the work; "any": the
outputs are right whoever computed them); a number that the samples cannot support is None and says
why, never a guess; every model of one frame is scored on tasks whose reference works. Does not
guarantee that an interval covers the truth for a handful of tasks: it says how much these tasks
disagree, not how unlike other tasks they are. Rejected kernels are never timed, so fast_p with p >
0 of the track "any" is a lower bound. Every formula is in docs/explanation/statistics.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kernels_eval.records import Json, Record
from tasks.benchmark.comparing import metric_name
from tasks.benchmark.metrics import (
    Interval,
    bootstrap_interval,
    hierarchical_interval,
    mean,
    rate_interval,
)
from tasks.benchmark.samples import (
    RULE_COLUMNS,
    RULES,
    TRACKS,
    Baseline,
    Rule,
    Samples,
    Track,
    excluded_tasks,
    missing_tasks,
    not_compared,
    rates,
    samples_by_model,
    unavailable_reason,
)

GEOMETRIC_MEAN = "geometric_mean_speedup"
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
Over = Literal["tasks", "tasks_and_samples"]


class ScoreRow(Record):
    """One number of one model on one track. Rates are shares in [0, 1], the geometric mean is a
    ratio; both are None where unsupported.

    `lower` and `upper` bound `value` with 95 % confidence by the named method: "plus_four"
    (`metrics.rate_interval`) for rates, or on request "hierarchical" (a bootstrap over tasks, then
    samples within them); for speedups a "bootstrap" over tasks. Tables of older versions have rates
    by the bootstrap, and by "wilson" where all tasks agree. `baseline` is what speedups are
    against: PyTorch as the task is written, or the same under torch.compile. `token_limit`: answers
    of more completion tokens count as none; None: answers as they are. `missing` counts tasks that
    other models of the same frame answered and this one did not. Where `value` is None, `why_not`
    says why.
    """

    model: str
    track: Track
    metric: str
    k: int | None = None
    value: float | None = None
    lower: float | None = None
    upper: float | None = None
    interval: Literal["plus_four", "bootstrap", "hierarchical", "wilson"] | None = None
    tasks: int
    samples: int
    rule: Rule = "concur"
    degenerate_counted: bool = False
    over: Over = "tasks"
    """what the bootstrap drew; the geometric mean's always draws tasks"""
    missing: int = 0
    why_not: str = ""
    baseline: Baseline = "eager"
    token_limit: int | None = None


def score(
    frame: pl.DataFrame,
    *,
    ks: Sequence[int],
    ps: Sequence[float],
    resamples: int = 2000,
    rule: Rule = "concur",
    count_degenerate: bool = False,
    over: Over = "tasks",
    baseline: Baseline = "eager",
) -> list[ScoreRow]:
    """All scores of all models against one baseline, by model (in order of first appearance),
    track, metric and k.

    `frame` has one row per verdict with a column `model` beside those of tasks.tables.VERDICTS
    (`COLUMNS` names those read; the rules of KernelBench and `count_degenerate` are described at
    `samples_by_model`). pass@k is the unbiased estimator per task (Chen et al. 2021), averaged over
    tasks; for fast_p at k, a sample passes when speedup > p. With k above the number of samples of
    any task the row is there with value None and says so. The geometric mean is over all correct,
    timed samples of all tasks (k None); its interval is always over tasks. A task whose reference
    fails for most candidates is left out for every model (`excluded_tasks`); a task that a model
    has no sample of is left out for that model and counted in `missing`. With the `baseline`
    "compile" there are rows of fast_p with p above 0 and of the geometric mean only (being right
    has no baseline), over the tasks whose reference could be timed under torch.compile; a model
    that was not timed against it has rows without a value. Raises UsageError for a frame that
    `samples_by_model` refuses.
    """
    rows: list[ScoreRow] = []
    known = samples_by_model(frame, rule=rule, count_degenerate=count_degenerate, baseline=baseline)
    wanted = [p for p in (None, *ps) if baseline == "eager" or p]
    absent = missing_tasks(known)
    for model, samples in known.items():
        facts: Json = {
            "model": model,
            "tasks": len(samples),
            "samples": sum(map(len, samples.values())),
            "rule": rule,
            "degenerate_counted": count_degenerate,
            "over": over,
            "missing": len(absent.get(model, ())),
            "baseline": baseline,
        }
        count = not_compared(frame, model) if baseline == "compile" else 0
        unknown = f"{count:,} of its timed samples were not timed against torch.compile"
        for track in TRACKS:
            numbers: dict[tuple[str, int | None], Json] = {
                (metric_name(p), k): {"why_not": unknown}
                if count
                else _rate(samples, track, p, k, over, resamples)
                for p in wanted
                for k in ks
            }
            numbers[GEOMETRIC_MEAN, None] = (
                {"why_not": unknown} if count else _geometric_mean(samples, track, resamples)
            )
            for (metric, k), found in numbers.items():
                rows.append(ScoreRow(**facts, track=track, metric=metric, k=k, **found))
    return rows


def variants(frame: pl.DataFrame, *, ks: Sequence[int], resamples: int = 2000) -> list[ScoreRow]:
    """Exec and fast_1 as other people would count them, beside our own rule: with KernelBench's two
    tolerances, with degenerate tasks kept, and by our own rule with intervals that also draw
    samples. Rules whose columns (`RULE_COLUMNS`) are not there are left out.
    """
    asked: Json = {"ks": ks, "ps": (1.0,), "resamples": resamples}
    rules = RULES if set(RULE_COLUMNS) <= set(frame.columns) else ("concur",)
    rows = score(frame, **asked, over="tasks_and_samples")
    rows += [row for rule in rules if rule != "concur" for row in score(frame, **asked, rule=rule)]
    if excluded_tasks(frame) != excluded_tasks(frame, count_degenerate=True):
        rows += [
            row for rule in rules for row in score(frame, **asked, rule=rule, count_degenerate=True)
        ]
    return [row for row in rows if row.metric != GEOMETRIC_MEAN]


def distribution(frame: pl.DataFrame, *, resamples: int = 2000) -> list[ScoreRow]:
    """Quantiles of the speedup of correct, timed samples, as rows with the metric "speedup_q0.5"
    and so on, k None.

    All samples of all tasks are pooled, as for the geometric mean: a task with many correct samples
    has a larger say. Linear interpolation between order statistics. The interval is a bootstrap
    over tasks; it is missing where only one task has a correct sample. Raises UsageError as `score`
    does.
    """
    rows: list[ScoreRow] = []
    for model, samples in samples_by_model(frame).items():
        for track in TRACKS:
            speeds = [values for values in _speeds(samples, track) if values]
            facts: Json = {
                "model": model,
                "track": track,
                "tasks": len(speeds),
                "samples": sum(map(len, speeds)),
            }
            for q in QUANTILES:
                found = _quantile(speeds, q, min(resamples, 1000))
                rows.append(ScoreRow(**facts, metric=f"speedup_q{q:g}", **found))
    return rows


def _speeds(samples: Samples, track: Track) -> list[list[float]]:
    """Speedups of correct, timed samples by task."""
    return [
        [s.speedup for s in group if s.passes(track, 0.0) and s.speedup > 0]
        for group in samples.values()
    ]


def _quantile(speeds: Sequence[Sequence[float]], q: float, resamples: int) -> Json:
    """Tasks are numbers to the bootstrap, and the statistic looks their samples up."""
    if not speeds:
        return {"why_not": "no correct, timed sample"}

    def pooled(drawn: NDArray[np.float64]) -> float:
        return float(np.quantile(np.concatenate([speeds[int(task)] for task in drawn]), q))

    tasks = np.arange(len(speeds), dtype=np.float64)
    return _bounds(
        pooled(tasks),
        bootstrap_interval(tasks, pooled, resamples=resamples) if len(speeds) > 1 else None,
    )


def _rate(
    samples: Samples, track: Track, p: float | None, k: int, over: Over, resamples: int
) -> Json:
    each = rates(samples, track, p, k)
    if each is None:
        return {"why_not": unavailable_reason(samples, k)}
    value, interval = mean(each), None
    if over == "tasks_and_samples":
        passed = [sum(s.passes(track, p) for s in group) for group in samples.values()]
        sizes = [len(group) for group in samples.values()]
        interval = hierarchical_interval(passed, sizes, k, resamples=resamples)
    if interval is not None:
        return _bounds(value, interval, "hierarchical")
    return _bounds(value, rate_interval(each), "plus_four")


def _geometric_mean(samples: Samples, track: Track, resamples: int) -> Json:
    """Over all passing, timed samples. Per task only the sum of logs and the count matter, so the
    bootstrap draws those two columns."""
    logs = [[math.log(speedup) for speedup in values] for values in _speeds(samples, track)]
    columns = np.array([[sum(values), len(values)] for values in logs], dtype=np.float64)
    value = _pooled(columns.reshape(-1, 2))
    if value is None:
        return {"why_not": "no correct, timed sample"}
    # one task with a correct sample cannot say how much tasks differ
    several = int(np.count_nonzero(columns[:, 1])) > 1
    return _bounds(
        value,
        bootstrap_interval(columns, _pooled, resamples=resamples) if several else None,
    )


def _pooled(columns: NDArray[np.float64]) -> float | None:
    total, count = columns.sum(axis=0)
    return math.exp(total / count) if count else None


def _bounds(value: float, interval: Interval | None, method: str = "bootstrap") -> Json:
    if interval is None:
        return {"value": value}
    return {"value": value, "lower": interval.lower, "upper": interval.upper, "interval": method}
