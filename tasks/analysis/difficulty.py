"""Difficulty of tasks by ARL, the average reasoning length over a task's samples (arXiv
2510.07356), and how far to trust it.

Guarantees: pure; tertiles of equal size by ARL (ties by task_id, so one file gives one division);
Exec and speedup per group with intervals over tasks; the same once more with ARL and outcome from
different samples of a task, because wrong samples may be long for their own reasons and would then
make any task that fails look hard. Does not guarantee that ARL is difficulty: agreement between two
generators is the evidence for that, and is measured where there are two.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kernels_eval.records import Record
from tasks.analysis.difficulty_words import difficulty_finding
from tasks.analysis.estimates import (
    LEVEL,
    MIN_GROUPS,
    Estimate,
    correlation,
    mean_of,
    number,
    quiet,
    unknown,
)
from tasks.analysis.lengths import samples_of

if TYPE_CHECKING:
    import polars as pl

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


class Group(Record):
    """Tasks with from_arl <= ARL <= to_arl (tokens). Exec is the mean over tasks of the share
    correct; the speedup is a geometric mean over correct, timed samples (a ratio)."""

    name: str
    from_arl: float
    to_arl: float
    tasks: int
    samples: int
    exec: Estimate
    speedup: Estimate


class Division(Record):
    """Groups from short to long ARL. `steps` are the drops of Exec from one group to the next
    (positive: falls), with intervals that hold with 95 % for all steps together. `exec_monotone`
    and `speedup_monotone` are "falls" (every interval is above 0), "not refuted" (every step falls,
    some interval holds 0), "refuted" (an interval is below 0), "not shown", or "unsayable".
    """

    label: str
    quantiles: tuple[float, ...]
    groups: tuple[Group, ...]
    steps: tuple[Estimate, ...]
    speed_steps: tuple[Estimate, ...]
    exec_monotone: str
    speedup_monotone: str


class Agreement(Record):
    """Two ARLs of the same tasks: Spearman's rho, the share of tasks in the same third, and Cohen's
    kappa with linear weights.

    `crossed` divides by the second generator's ARL and judges the first one's samples.
    """

    first: str
    second: str
    tasks: int
    spearman: Estimate
    same_third: Estimate
    kappa: Estimate
    crossed: Division | None


class Difficulty(Record):
    """`tertiles` as the paper divides; `split_half` with ARL of every second sample and outcomes of
    the others (None: one sample a task).

    `sensitivity` moves the thresholds, and takes medians, or only samples that were not cut off.
    `reliability` is Spearman's rho between ARLs of two halves of the samples.
    """

    tasks: int
    samples: int
    arl_exec: Estimate
    tertiles: Division | None
    split_half: Division | None
    reliability: Estimate
    sensitivity: tuple[Division, ...]
    agreement: Agreement | None
    finding: tuple[str, ...] = ()


def difficulty(
    frame: pl.DataFrame, other: pl.DataFrame | None = None, *, seed: int = 0
) -> Difficulty:
    """Difficulty of the tasks of a frame as `observe` takes it; `other` holds samples of another
    generator on the same tasks.

    Without `other`, a frame of several generators is divided: the one with most samples is judged,
    the next is the other. Raises UsageError as `observe` does.
    """
    import polars as pl

    data = _named(frame)
    second = _named(other) if other is not None else None
    names = data["generator"].value_counts(sort=True)["generator"].to_list()
    if second is None and len(names) > 1:
        second = data.filter(pl.col("generator") == names[1])
    if len(names) > 1:
        data = data.filter(pl.col("generator") == names[0])
    return difficulty_of(data, second, seed=seed)


def difficulty_of(data: pl.DataFrame, second: pl.DataFrame | None, *, seed: int) -> Difficulty:
    """`difficulty` of prepared samples (`lengths.Samples.data` with the column task_id)."""
    import polars as pl

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
    return found.model_copy(update={"finding": difficulty_finding(found)})


def divide(tasks: pl.DataFrame, quantiles: Sequence[float], label: str) -> Division | None:
    """Tasks in groups by rank of `arl`; None where there are fewer tasks than groups."""
    import polars as pl

    count = len(quantiles) + 1
    if tasks.height < count:
        return None
    ordered = tasks.sort("arl", "task_id")
    edges = [0, *(round(q * tasks.height) for q in quantiles), tasks.height]
    if any(first == last for first, last in itertools.pairwise(edges)):
        return None
    names = GROUPS if count == 3 else tuple(f"{number + 1} of {count}" for number in range(count))
    parts = [ordered.slice(first, last - first) for first, last in itertools.pairwise(edges)]
    groups = []
    for name, part in zip(names, parts, strict=True):
        low, high = float(part["arl"].item(0)), float(part["arl"].item(-1))
        timed = part.filter(pl.col("timed") > 0)
        facts = {
            "name": name,
            "from_arl": low,
            "to_arl": high,
            "tasks": part.height,
            "samples": int(part["samples"].sum()),
        }
        groups.append(Group(**facts, exec=_exec(part), speedup=_geometric(timed)))
    shares = [part["share"].to_numpy() for part in parts]
    timed_parts = [part.filter(pl.col("timed") > 0) for part in parts]
    steps = tuple(_step(a, b, count - 1) for a, b in itertools.pairwise(shares))
    speeds = tuple(_speed_step(a, b, count - 1) for a, b in itertools.pairwise(timed_parts))
    return Division(
        label=label,
        quantiles=tuple(quantiles),
        groups=tuple(groups),
        steps=steps,
        speed_steps=speeds,
        exec_monotone=monotone(steps),
        speedup_monotone=monotone(speeds),
    )


def monotone(steps: Sequence[Estimate]) -> str:
    """What the drops between groups say of "falls with every step" (`Division` names the
    answers)."""
    if any(step.value is None or not step.bounded for step in steps):
        return "unsayable"
    if any(step.upper < 0 for step in steps):  # type: ignore[operator]
        return "refuted"
    if all(step.lower > 0 for step in steps):  # type: ignore[operator]
        return "falls"
    return "not refuted" if all(step.value > 0 for step in steps) else "not shown"  # type: ignore[operator]


def _named(frame: pl.DataFrame) -> pl.DataFrame:
    import polars as pl

    samples = samples_of(frame)
    names = pl.DataFrame(
        {
            "task_id": samples.task_ids,
            "task": pl.Series(range(len(samples.task_ids)), dtype=pl.UInt32),
        }
    )
    return samples.data.join(names, on="task", how="left", maintain_order="left")


def _per_task(data: pl.DataFrame) -> pl.DataFrame:
    import polars as pl

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
    from statsmodels.stats.proportion import proportion_confint

    shares = part["share"].to_numpy()
    found = mean_of(shares, part.height, "Student's t over tasks")
    if found.bounded:
        return found.model_copy(
            update={"lower": max(0.0, found.lower or 0.0), "upper": min(1.0, found.upper or 0.0)}
        )
    # all tasks alike: one trial a task, or the interval would be a point
    lower, upper = proportion_confint(
        float(shares.sum()), part.height, alpha=1 - LEVEL, method="wilson"
    )
    # rounding must not put the share outside its own interval
    bounds = {
        "lower": max(0.0, min(float(lower), float(shares.mean()))),
        "upper": min(1.0, max(float(upper), float(shares.mean()))),
    }
    return found.model_copy(update={**bounds, "method": "Wilson, one trial a task"})


def _geometric(timed: pl.DataFrame) -> Estimate:
    """Over samples, as scores are; the interval's error is that of a ratio of sums over tasks
    (weights: timed samples of a task)."""
    from statsmodels.regression.linear_model import WLS

    if timed.is_empty():
        return unknown("no correct sample has a speedup")
    logs, weights = (
        (timed["log_sum"] / timed["timed"]).to_numpy(),
        timed["timed"].to_numpy().astype(np.float64),
    )
    total, tasks, method = (
        int(weights.sum()),
        timed.height,
        "weighted by samples, robust over tasks",
    )
    value = float(np.exp(np.average(logs, weights=weights)))
    if tasks < MIN_GROUPS or np.ptp(logs) == 0:
        return Estimate(value=number(value), n=total, tasks=tasks, method=method)
    with quiet():
        fit = WLS(logs, np.ones(tasks), weights=weights).fit(cov_type="HC1", use_t=True)
        lower, upper = np.exp(fit.conf_int(alpha=1 - LEVEL)[0])
    return Estimate(
        value=number(value),
        lower=number(lower),
        upper=number(upper),
        n=total,
        tasks=tasks,
        method=method,
    )


def _step(before: np.ndarray, after: np.ndarray, steps: int) -> Estimate:
    """Mean of `before` less mean of `after`, Welch's interval over tasks; 95 % for all `steps`
    together (Bonferroni)."""
    from statsmodels.stats.weightstats import CompareMeans, DescrStatsW

    n = len(before) + len(after)
    if not len(before) or not len(after):
        return unknown("a group has no value", n, n)
    value = float(before.mean() - after.mean())
    if min(len(before), len(after)) < 2 or (np.ptp(before) == 0 and np.ptp(after) == 0):
        return Estimate(value=value, n=n, tasks=n, method="Welch over tasks")
    with quiet():
        lower, upper = CompareMeans(DescrStatsW(before), DescrStatsW(after)).tconfint_diff(
            alpha=(1 - LEVEL) / steps, usevar="unequal"
        )
    return Estimate(
        value=value,
        lower=number(lower),
        upper=number(upper),
        n=n,
        tasks=n,
        method="Welch over tasks",
    )


def _speed_step(before: pl.DataFrame, after: pl.DataFrame, steps: int) -> Estimate:
    """The fall of the mean logarithm of the speedup, weighted as `_geometric` weights it, so that a
    step falls where the two means do."""
    from statsmodels.regression.linear_model import WLS

    n = before.height + after.height
    if before.is_empty() or after.is_empty():
        return unknown("a group has no value", n, n)
    logs, weights = (
        [(part["log_sum"] / part["timed"]).to_numpy() for part in (before, after)],
        [before["timed"], after["timed"]],
    )
    value = float(np.average(logs[0], weights=weights[0]) - np.average(logs[1], weights=weights[1]))
    if min(before.height, after.height) < 2 or all(np.ptp(each) == 0 for each in logs):
        return Estimate(value=value, n=n, tasks=n, method="weighted by samples, robust over tasks")
    first = np.concatenate([np.ones(before.height), np.zeros(after.height)])
    with quiet():
        fit = WLS(
            np.concatenate(logs),
            np.column_stack([np.ones(n), first]),
            weights=np.concatenate(weights),
        ).fit(cov_type="HC1", use_t=True)
        lower, upper = fit.conf_int(alpha=(1 - LEVEL) / steps)[1]
    return Estimate(
        value=value,
        lower=number(lower),
        upper=number(upper),
        n=n,
        tasks=n,
        method="weighted by samples, robust over tasks",
    )


def _rank(x: pl.Series, y: pl.Series, seed: int) -> Estimate:
    values = x.to_numpy().astype(np.float64)
    return correlation(
        values, y.to_numpy().astype(np.float64), np.arange(len(values)), ranks=True, seed=seed
    )


def _agreement(
    tasks: pl.DataFrame, second: pl.DataFrame, data: pl.DataFrame, seed: int
) -> Agreement:
    import polars as pl
    from statsmodels.stats.inter_rater import cohens_kappa
    from statsmodels.stats.proportion import proportion_confint

    theirs = _per_task(second).select("task_id", pl.col("arl").alias("other"))
    shared = tasks.join(theirs, on="task_id", how="inner").sort("task_id")
    names = {"first": _generator(data), "second": _generator(second), "tasks": shared.height}
    if shared.height < 3:
        none = unknown(f"{shared.height} tasks are shared", shared.height, shared.height)
        return Agreement(**names, spearman=none, same_third=none, kappa=none, crossed=None)
    ours, other = (_thirds(shared, column) for column in ("arl", "other"))
    table = np.zeros((3, 3))
    np.add.at(table, (ours, other), 1)
    with quiet():
        found = cohens_kappa(table, wt="linear")
    n, same = shared.height, int(np.trace(table))
    lower, upper = proportion_confint(same, n, alpha=1 - LEVEL, method="wilson")
    facts = {"n": n, "tasks": n}
    kappa = {
        "value": number(found.kappa),
        "lower": number(found.kappa_low),
        "upper": number(found.kappa_upp),
    }
    return Agreement(
        **names,
        spearman=_rank(shared["arl"], shared["other"], seed),
        same_third=Estimate(
            value=same / n, lower=float(lower), upper=float(upper), **facts, method="Wilson"
        ),
        kappa=Estimate(**kappa, **facts, method="Cohen's kappa, linear weights"),
        crossed=divide(
            shared.with_columns(arl=pl.col("other")),
            SPLITS[0],
            f"thirds by the ARL of {names['second']}",
        ),
    )


def _thirds(tasks: pl.DataFrame, column: str) -> np.ndarray:
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
    return " / ".join(f"{100 * (last - first):.0f} %" for first, last in itertools.pairwise(edges))
