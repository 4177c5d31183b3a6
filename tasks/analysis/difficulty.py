"""Difficulty of tasks by ARL, the average reasoning length over a task's samples (arXiv
2510.07356), and how far to trust it.

Guarantees: pure; tertiles by ARL, of equal size within each level and token limit (a limit shortens
all of its level's tasks; ties by task_id, so one file gives one division);
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
    Basis,
    Floats,
    correlation,
    quiet,
    wilson,
)
from tasks.analysis.findings import difficulty_findings, difficulty_headline, steps_checks
from tasks.analysis.lengths import samples_of
from tasks.analysis.records import Agreement, Difficulty, Division, Group
from tasks.analysis.verdict import judge
from tasks.reporting.findings import Estimate

ROBUST = "weighted by samples, robust over tasks"
GROUPS = ("easy", "medium", "hard")
THIRDS = (1 / 3, 2 / 3)
OTHER_SPLITS: tuple[tuple[float, ...], ...] = (
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
    second = data.clear() if other is None else samples_of(other).data
    names = data["generator"].value_counts(sort=True)["generator"].to_list()
    if len(names) > 1:
        if other is None:
            second = data.filter(pl.col("generator") == names[1])
        data = data.filter(pl.col("generator") == names[0])
    tasks = _per_task(data)
    half = pl.int_range(pl.len()).over("task") % 2
    first_half, second_half = (_per_task(data.filter(half == number)) for number in (0, 1))
    both = first_half.select("task_id", "arl").join(second_half, on="task_id", suffix="_again")
    complete = data.filter(~pl.col("truncated"))
    sensitivity = [divide(tasks, quantiles, _split_name(quantiles)) for quantiles in OTHER_SPLITS]
    by_median = tasks.with_columns(arl=pl.col("median"))
    sensitivity.append(divide(by_median, THIRDS, "thirds by median length"))
    if 0 < complete.height < data.height:
        sensitivity.append(divide(_per_task(complete), THIRDS, "thirds without samples cut off"))
    found = Difficulty(
        tasks=tasks.height,
        samples=data.height,
        arl_exec=_rank(tasks, "arl", "share", seed),
        tertiles=divide(tasks, THIRDS, "thirds"),
        split_half=divide(both, THIRDS, "thirds, ARL and outcomes of different samples"),
        reliability=_rank(both, "arl", "arl_again", seed),
        sensitivity=tuple(division for division in sensitivity if division is not None),
        agreement=_agreement(tasks, second, _generator(data), seed) if second.height else None,
    )
    rows = difficulty_findings(found)
    said = {"finding": (difficulty_headline(found, rows),), "findings": rows}
    return found.model_copy(update=said)


def divide(tasks: pl.DataFrame, quantiles: Sequence[float], label: str) -> Division | None:
    """Tasks in groups by rank of `arl` within their stratum, so that each group holds the same
    share of every level and token limit; None where there are fewer tasks than groups."""
    count = len(quantiles) + 1
    group = _groups(tasks, "arl", quantiles)
    parts = [tasks.filter(group == number).sort("arl", "task_id") for number in range(count)]
    if any(part.is_empty() for part in parts):
        return None
    names = GROUPS if count == 3 else tuple(f"{number + 1} of {count}" for number in range(count))
    timed = [part.filter(pl.col("timed") > 0) for part in parts]
    shares = [part["share"].to_numpy() for part in parts]
    steps = tuple(_step(*both, steps=count - 1) for both in pairwise(shares))
    speeds = tuple(_speed_step(*both, steps=count - 1) for both in pairwise(timed))
    return Division(
        label=label,
        quantiles=tuple(quantiles),
        groups=tuple(map(_group, names, parts, timed)),
        steps=steps,
        speed_steps=speeds,
        exec_monotone=judge(steps_checks(steps))[0],
        speedup_monotone=judge(steps_checks(speeds))[0],
    )


def _groups(tasks: pl.DataFrame, column: str, quantiles: Sequence[float]) -> pl.Series:
    """The number of each task's group: by rank within its stratum, ties by task_id."""
    rank = pl.struct(column, "task_id").rank("ordinal")
    edges = ((q * pl.len()).round() for q in quantiles)
    return tasks.select(
        pl.sum_horizontal(rank > edge for edge in edges).over("stratum")
    ).to_series()


def _group(name: str, part: pl.DataFrame, timed: pl.DataFrame) -> Group:
    return Group(
        name=name,
        from_arl=part["arl"].item(0),
        to_arl=part["arl"].item(-1),
        tasks=part.height,
        samples=int(part["samples"].sum()),
        exec=_exec(part["share"].to_numpy()),
        speedup=_geometric(timed),
    )


def _per_task(data: pl.DataFrame) -> pl.DataFrame:
    return (
        data.group_by("task")
        .agg(
            pl.col("task_id").first(),
            pl.col("stratum").first(),
            arl=pl.col("tokens").mean(),
            median=pl.col("tokens").median(),
            samples=pl.len(),
            share=pl.col("correct").mean(),
            log_sum=pl.col("speedup").log().sum(),
            timed=pl.col("speedup").count(),
        )
        .sort("task_id")
    )


def _exec(shares: Floats) -> Estimate:
    """Mean share of a group's tasks, with Student's interval."""
    from statsmodels.stats.weightstats import DescrStatsW

    value, basis = shares.mean(), Basis(len(shares), len(shares))
    if len(shares) > 1 and np.ptp(shares):
        lower, upper = DescrStatsW(shares).tconfint_mean(alpha=1 - LEVEL)
        bounds = max(0.0, lower), min(1.0, upper)
        return basis.estimate(value, bounds, "Student's t over tasks")
    # all tasks alike: one trial a task, or the interval would be a point
    bounds = wilson(float(shares.sum()), len(shares))
    return basis.estimate(value, bounds, "Wilson, one trial a task")


def _logs(timed: pl.DataFrame) -> tuple[Floats, Floats, float]:
    """Mean log speedup of each task, its weight (the task's timed samples), and their mean."""
    logs, weights = (timed["log_sum"] / timed["timed"]).to_numpy(), timed["timed"].to_numpy()
    weights = weights.astype(np.float64)
    return logs, weights, float(np.average(logs, weights=weights))


def _robust(logs: Floats, weights: Floats, design: Floats, alpha: float) -> Sequence[float] | None:
    """Interval of the last coefficient, with the error of a ratio of sums over tasks; None where
    the logarithms do not vary."""
    from statsmodels.regression.linear_model import WLS

    if not np.ptp(logs):
        return None
    with quiet():
        fit = WLS(logs, design, weights=weights).fit(cov_type="HC1", use_t=True)
        bounds: Sequence[float] = fit.conf_int(alpha=alpha)[-1]
    return bounds


def _geometric(timed: pl.DataFrame) -> Estimate:
    """Geometric-mean speedup over samples, as scores are."""
    if timed.is_empty():
        return Basis().unknown("no correct sample has a speedup")
    logs, weights, mean = _logs(timed)
    bounds = None
    if timed.height >= MIN_GROUPS:
        bounds = _robust(logs, weights, np.ones(timed.height), 1 - LEVEL)
    basis = Basis(int(weights.sum()), timed.height)
    if bounds is not None:
        bounds = [float(np.exp(bound)) for bound in bounds]
    return basis.estimate(float(np.exp(mean)), bounds, ROBUST)


def _step(before: Floats, after: Floats, steps: int) -> Estimate:
    """Mean of `before` less mean of `after`, Welch's interval over tasks.

    The interval holds with 95 % for all `steps` together (Bonferroni).
    """
    from statsmodels.stats.weightstats import CompareMeans, DescrStatsW

    n = len(before) + len(after)
    bounds = None
    if min(len(before), len(after)) > 1 and (np.ptp(before) or np.ptp(after)):
        with quiet():
            both = CompareMeans(DescrStatsW(before), DescrStatsW(after))
            bounds = both.tconfint_diff(alpha=(1 - LEVEL) / steps, usevar="unequal")
    return Basis(n, n).estimate(before.mean() - after.mean(), bounds, "Welch over tasks")


def _speed_step(before: pl.DataFrame, after: pl.DataFrame, steps: int) -> Estimate:
    """The fall of the mean logarithm of the speedup, weighted as `_geometric` weights it.

    So a step falls where the two means do.
    """
    n = before.height + after.height
    if before.is_empty() or after.is_empty():
        return Basis(n, n).unknown("a group has no value")
    (logs, weights, mean), (later, later_weights, later_mean) = _logs(before), _logs(after)
    bounds = None
    if min(before.height, after.height) > 1 and (np.ptp(logs) or np.ptp(later)):
        first = np.repeat([1.0, 0.0], [before.height, after.height])
        bounds = _robust(
            np.concatenate([logs, later]),
            np.concatenate([weights, later_weights]),
            np.column_stack([np.ones(n), first]),
            (1 - LEVEL) / steps,
        )
    return Basis(n, n).estimate(mean - later_mean, bounds, ROBUST)


def _rank(tasks: pl.DataFrame, x: str, y: str, seed: int) -> Estimate:
    """Spearman's rho of two columns, each as ranks within its stratum."""
    ranks = tasks.select((pl.col(x, y).rank("average") / pl.len()).over("stratum"))
    values, others = (ranks[name].to_numpy() for name in (x, y))
    return correlation(values, others, np.arange(len(values)), ranks=True, seed=seed)


def _agreement(tasks: pl.DataFrame, second: pl.DataFrame, first: str, seed: int) -> Agreement:
    from statsmodels.stats.inter_rater import cohens_kappa

    others = _per_task(second).select("task_id", other="arl")
    shared = tasks.join(others, on="task_id", how="inner").sort("task_id")
    n, name = shared.height, _generator(second)
    basis = Basis(n, n)
    same_third = kappa = spearman = basis.unknown(f"{n} tasks are shared")
    if n >= 3:
        table = np.zeros((3, 3))
        np.add.at(table, tuple(_groups(shared, name, THIRDS) for name in ("arl", "other")), 1)
        same = int(np.trace(table))
        with quiet():
            found = cohens_kappa(table, wt="linear")
        bounds = (found.kappa_low, found.kappa_upp)
        spearman = _rank(shared, "arl", "other", seed)
        same_third = basis.estimate(same / n, wilson(same, n), "Wilson")
        kappa = basis.estimate(found.kappa, bounds, "Cohen's kappa, linear weights")
    crossed = shared.with_columns(arl=pl.col("other"))
    return Agreement(
        first=first,
        second=name,
        tasks=n,
        spearman=spearman,
        same_third=same_third,
        kappa=kappa,
        crossed=divide(crossed, THIRDS, f"thirds by the ARL of {name}"),
    )


def _generator(data: pl.DataFrame) -> str:
    names = sorted({str(name) for name in data["generator"].unique() if name})
    return ", ".join(names) or "unnamed generator"


def _split_name(quantiles: Sequence[float]) -> str:
    edges = [0.0, *quantiles, 1.0]
    return " / ".join(f"{100 * (last - first):.0f} %" for first, last in pairwise(edges))
