"""Difficulty of tasks by ARL, the average reasoning length over a task's samples (arXiv
2510.07356), and how far to trust it.

Guarantees: pure; tertiles of equal size by ARL (ties by task_id, so one file gives one division);
Exec and speedup per group with intervals over tasks; the same once more with ARL and outcome from
different samples of a task, because wrong samples may be long for their own reasons and would then
make any task that fails look hard. Does not guarantee that ARL is difficulty: agreement between two
generators is the evidence for that, and is measured where there are two.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import polars as pl

from tasks.analysis.estimates import (
    LEVEL,
    MIN_GROUPS,
    Codes,
    Floats,
    correlation,
    estimate,
    mean_of,
    quiet,
    unknown,
    wilson,
)
from tasks.analysis.findings import difficulty_findings, difficulty_headline
from tasks.analysis.lengths import samples_of
from tasks.analysis.records import Agreement, Difficulty, Division, Group
from tasks.reporting.findings import Estimate

ROBUST = "weighted by samples, robust over tasks"
GROUPS = ("easy", "medium", "hard")
SPLITS: tuple[tuple[float, ...], ...] = (
    (1 / 3, 2 / 3),
    (0.25, 0.75),
    (0.3, 0.6),
    (0.4, 0.7),
    (0.5,),
    (0.25, 0.5, 0.75),
    (0.2, 0.4, 0.6, 0.8),
)


def difficulty(
    frame: pl.DataFrame, other: pl.DataFrame | None = None, *, seed: int = 0
) -> Difficulty:
    """Difficulty of the tasks of a frame as `observe` takes it; `other` holds samples of another
    generator on the same tasks.

    Without `other`, a frame of several generators is divided: the one with most samples is judged,
    the next is the other. Raises UsageError as `observe` does.
    """
    data = samples_of(frame).data
    second = samples_of(other).data if other is not None else None
    names = data["generator"].value_counts(sort=True)["generator"].to_list()
    if second is None and len(names) > 1:
        second = data.filter(pl.col("generator") == names[1])
    if len(names) > 1:
        data = data.filter(pl.col("generator") == names[0])
    return difficulty_of(data, second, seed=seed)


def difficulty_of(data: pl.DataFrame, second: pl.DataFrame | None, *, seed: int) -> Difficulty:
    """`difficulty` of prepared samples (`lengths.Samples.data` with the column task_id)."""
    tasks = _per_task(data)
    numbered = data.with_columns(_half=pl.int_range(pl.len()).over("task") % 2)
    first_half, second_half = (
        _per_task(numbered.filter(pl.col("_half") == half)) for half in (0, 1)
    )
    halves = first_half.select("task_id", "arl").join(
        second_half.drop("arl", "median"), on="task_id", how="inner"
    )
    both = first_half.join(
        second_half.select("task_id", pl.col("arl").alias("again")), on="task_id", how="inner"
    )
    complete = data.filter(~pl.col("truncated"))
    sensitivity = [divide(tasks, quantiles, _split_name(quantiles)) for quantiles in SPLITS[1:]]
    sensitivity.append(
        divide(tasks.with_columns(arl=pl.col("median")), SPLITS[0], "thirds by median length")
    )
    if 0 < complete.height < data.height:
        sensitivity.append(divide(_per_task(complete), SPLITS[0], "thirds without samples cut off"))
    found = Difficulty(
        tasks=tasks.height,
        samples=data.height,
        arl_exec=_rank(tasks["arl"], tasks["share"], seed),
        tertiles=divide(tasks, SPLITS[0], "thirds"),
        split_half=divide(halves, SPLITS[0], "thirds, ARL and outcomes of different samples"),
        reliability=_rank(both["arl"], both["again"], seed),
        sensitivity=tuple(division for division in sensitivity if division is not None),
        agreement=(
            _agreement(tasks, second, data, seed) if second is not None and second.height else None
        ),
    )
    return found.model_copy(
        update={"finding": (difficulty_headline(found),), "findings": difficulty_findings(found)}
    )


def divide(tasks: pl.DataFrame, quantiles: Sequence[float], label: str) -> Division | None:
    """Tasks in groups by rank of `arl`; None where there are fewer tasks than groups."""
    count = len(quantiles) + 1
    if tasks.height < count:
        return None
    ordered = tasks.sort("arl", "task_id")
    edges = [0, *(round(q * tasks.height) for q in quantiles), tasks.height]
    if any(first == last for first, last in pairwise(edges)):
        return None
    names = GROUPS if count == 3 else tuple(f"{number + 1} of {count}" for number in range(count))
    parts = [ordered.slice(first, last - first) for first, last in pairwise(edges)]
    timed = [part.filter(pl.col("timed") > 0) for part in parts]
    steps = tuple(
        _step(a["share"].to_numpy(), b["share"].to_numpy(), count - 1) for a, b in pairwise(parts)
    )
    speeds = tuple(_speed_step(a, b, count - 1) for a, b in pairwise(timed))
    return Division(
        label=label,
        quantiles=tuple(quantiles),
        groups=tuple(map(_group, names, parts, timed)),
        steps=steps,
        speed_steps=speeds,
        exec_monotone=monotone(steps),
        speedup_monotone=monotone(speeds),
    )


def _group(name: str, part: pl.DataFrame, timed: pl.DataFrame) -> Group:
    return Group(
        name=name,
        from_arl=part["arl"].item(0),
        to_arl=part["arl"].item(-1),
        tasks=part.height,
        samples=int(part["samples"].sum()),
        exec=_exec(part),
        speedup=_geometric(timed),
    )


def monotone(steps: Sequence[Estimate]) -> str:
    """Return what the drops between groups say of "falls with every step", as `Division` lists."""
    sides = [step.side(0.0) for step in steps]
    if any(step.value is None or not step.bounded for step in steps):
        return "unsayable"
    if -1 in sides:
        return "refuted"
    if set(sides) <= {1}:
        return "falls"
    return "not refuted" if all((step.value or 0.0) > 0 for step in steps) else "not shown"


def _per_task(data: pl.DataFrame) -> pl.DataFrame:
    return (
        data.group_by("task")
        .agg(
            pl.col("task_id").first(),
            pl.col("tokens").mean().alias("arl"),
            pl.col("tokens").median().alias("median"),
            pl.len().alias("samples"),
            pl.col("correct").mean().alias("share"),
            pl.col("correct").sum().alias("right"),
            pl.col("speedup").log().sum().alias("log_sum"),
            pl.col("speedup").count().alias("timed"),
        )
        .sort("task_id")
    )


def _exec(part: pl.DataFrame) -> Estimate:
    shares = part["share"].to_numpy()
    found = mean_of(shares, part.height, "Student's t over tasks")
    if found.lower is not None and found.upper is not None:
        bounds = {"lower": max(0.0, found.lower), "upper": min(1.0, found.upper)}
        return found.model_copy(update=bounds)
    # all tasks alike: one trial a task, or the interval would be a point
    lower, upper = wilson(float(shares.sum()), part.height)
    method = "Wilson, one trial a task"
    return found.model_copy(update={"lower": lower, "upper": upper, "method": method})


def _logs(timed: pl.DataFrame) -> tuple[Floats, Floats]:
    """Mean log speedup of each task, and its weight: the task's timed samples."""
    weights = timed["timed"].to_numpy().astype(np.float64)
    return (timed["log_sum"] / timed["timed"]).to_numpy(), weights


def _geometric(timed: pl.DataFrame) -> Estimate:
    """Over samples, as scores are; the interval's error is that of a ratio of sums over tasks."""
    from statsmodels.regression.linear_model import WLS

    if timed.is_empty():
        return unknown("no correct sample has a speedup")
    logs, weights = _logs(timed)
    bounds = None
    if timed.height >= MIN_GROUPS and np.ptp(logs):
        with quiet():
            fit = WLS(logs, np.ones(timed.height), weights=weights)
            interval = fit.fit(cov_type="HC1", use_t=True).conf_int(alpha=1 - LEVEL)
            bounds = np.exp(interval[0])
    value = float(np.exp(np.average(logs, weights=weights)))
    return _estimate(value, bounds, int(weights.sum()), timed.height, ROBUST)


def _step(before: Floats, after: Floats, steps: int) -> Estimate:
    """Mean of `before` less mean of `after`, Welch's interval over tasks.

    The interval holds with 95 % for all `steps` together (Bonferroni).
    """
    from statsmodels.stats.weightstats import CompareMeans, DescrStatsW

    n = len(before) + len(after)
    if not len(before) or not len(after):
        return unknown("a group has no value", n, n)
    bounds = None
    if min(len(before), len(after)) > 1 and (np.ptp(before) or np.ptp(after)):
        with quiet():
            both = CompareMeans(DescrStatsW(before), DescrStatsW(after))
            bounds = both.tconfint_diff(alpha=(1 - LEVEL) / steps, usevar="unequal")
    return _estimate(before.mean() - after.mean(), bounds, n, n, "Welch over tasks")


def _speed_step(before: pl.DataFrame, after: pl.DataFrame, steps: int) -> Estimate:
    """The fall of the mean logarithm of the speedup, weighted as `_geometric` weights it.

    So a step falls where the two means do.
    """
    from statsmodels.regression.linear_model import WLS

    n = before.height + after.height
    if before.is_empty() or after.is_empty():
        return unknown("a group has no value", n, n)
    (logs, weights), (other_logs, other_weights) = _logs(before), _logs(after)
    value = np.average(logs, weights=weights) - np.average(other_logs, weights=other_weights)
    bounds = None
    if min(before.height, after.height) > 1 and (np.ptp(logs) or np.ptp(other_logs)):
        first = np.concatenate([np.ones(before.height), np.zeros(after.height)])
        with quiet():
            fit = WLS(
                np.concatenate([logs, other_logs]),
                np.column_stack([np.ones(n), first]),
                weights=np.concatenate([weights, other_weights]),
            ).fit(cov_type="HC1", use_t=True)
            bounds = fit.conf_int(alpha=(1 - LEVEL) / steps)[1]
    return _estimate(value, bounds, n, n, ROBUST)


def _estimate(
    value: float, bounds: Sequence[float] | None, n: int, tasks: int, method: str
) -> Estimate:
    known = (bounds[0], bounds[1]) if bounds is not None else None
    return estimate(value, known, n=n, tasks=tasks, method=method)


def _rank(x: pl.Series, y: pl.Series, seed: int) -> Estimate:
    values = x.to_numpy().astype(np.float64)
    return correlation(
        values, y.to_numpy().astype(np.float64), np.arange(len(values)), ranks=True, seed=seed
    )


def _agreement(
    tasks: pl.DataFrame, second: pl.DataFrame, data: pl.DataFrame, seed: int
) -> Agreement:
    from statsmodels.stats.inter_rater import cohens_kappa

    theirs = _per_task(second).select("task_id", pl.col("arl").alias("other"))
    shared = tasks.join(theirs, on="task_id", how="inner").sort("task_id")
    n, name = shared.height, _generator(second)
    none = unknown(f"{n} tasks are shared", n, n)
    found = Agreement(
        first=_generator(data),
        second=name,
        tasks=n,
        spearman=none,
        same_third=none,
        kappa=none,
        crossed=None,
    )
    if n < 3:
        return found
    table = np.zeros((3, 3))
    np.add.at(table, (_thirds(shared, "arl"), _thirds(shared, "other")), 1)
    with quiet():
        kappa = cohens_kappa(table, wt="linear")
    same = int(np.trace(table))
    crossed = shared.with_columns(arl=pl.col("other"))
    return found.model_copy(
        update={
            "spearman": _rank(shared["arl"], shared["other"], seed),
            "same_third": _estimate(same / n, wilson(same, n), n, n, "Wilson"),
            "kappa": _estimate(
                kappa.kappa,
                (kappa.kappa_low, kappa.kappa_upp),
                n,
                n,
                "Cohen's kappa, linear weights",
            ),
            "crossed": divide(crossed, SPLITS[0], f"thirds by the ARL of {name}"),
        }
    )


def _thirds(tasks: pl.DataFrame, column: str) -> Codes:
    order = (
        tasks.select(column, "task_id")
        .with_row_index("row")
        .sort(column, "task_id")["row"]
        .to_numpy()
    )
    third = np.empty(len(order), dtype=np.int64)
    third[order] = np.arange(len(order)) * 3 // len(order)
    return third


def _generator(data: pl.DataFrame) -> str:
    return (
        ", ".join(sorted({str(name) for name in data["generator"].unique().to_list() if name}))
        or "unnamed generator"
    )


def _split_name(quantiles: Sequence[float]) -> str:
    edges = [0.0, *quantiles, 1.0]
    return " / ".join(f"{100 * (last - first):.0f} %" for first, last in pairwise(edges))
