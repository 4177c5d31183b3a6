"""ConCuR's observations (arXiv 2510.07356) on any verified candidates: reasoning length against
correctness and against speedup.

Guarantees: pure; the same frame and configuration give the same record; every figure carries its n
and an interval, or says why there is none; accuracy is analysed with the samples that the token
limit cut off and without them, pooled and within tasks. Does not guarantee a cause, nor that
Wilson's intervals hold over tasks: they treat samples as independent, as the paper's figure does,
and are for looking at. What the findings claim rests on intervals clustered by task.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from polars.dataframe.group_by import GroupBy

from tasks.analysis.config import ObservationConfig
from tasks.analysis.estimates import (
    LEVEL,
    Codes,
    Floats,
    correlation,
    longer_if_incorrect,
    number,
    pooled_odds_ratio,
    quiet,
    unknown,
    wilson,
)
from tasks.analysis.findings import cautions, findings, headline
from tasks.analysis.lengths import JudgedSamples, samples_of
from tasks.analysis.records import (
    Bin,
    LengthAndSpeedup,
    Observations,
    Population,
    SpeedTenth,
    Spread,
    bend,
)
from tasks.analysis.within import demeaned, fixed_effects, within_task
from tasks.reporting.findings import Estimate


def observe(frame: pl.DataFrame, config: ObservationConfig | None = None) -> Observations:
    """Return all observations of verdicts joined with their candidates.

    `lengths` names the columns read. Raises UsageError for a missing column and where no sample has
    both a length and an outcome; anything else that the data cannot say (no correct sample, one
    task, no speedup) is said in its place.
    """
    return observe_samples(samples_of(frame), config or ObservationConfig())


def observe_samples(samples: JudgedSamples, config: ObservationConfig) -> Observations:
    """Return the observations of samples that are prepared already."""
    data = samples.data
    cut = data.filter("truncated")
    complete = data.filter(~pl.col("truncated")) if 0 < cut.height < data.height else None
    found = Observations(
        rows=samples.rows,
        samples=data.height,
        tasks=data["task"].n_unique(),
        generators=tuple(sorted(str(name) for name in data["generator"].unique() if name)),
        left_out=samples.left_out,
        length_unit=config.length_unit,
        unit_tokens=config.unit_tokens,
        truncated=cut.height if samples.knows_truncation else None,
        truncated_correct=int(cut["correct"].sum()),
        everything=population("all", data, config),
        complete=None if complete is None else population("complete", complete, config),
        speedup=length_and_speedup(data.filter(pl.col("speedup").is_not_null()), config),
    )
    rows = findings(found)
    return found.model_copy(
        update={
            "finding": (headline(rows[:2]),),
            "findings": rows,
            "cautions": cautions(found),
        }
    )


def population(name: str, data: pl.DataFrame, config: ObservationConfig) -> Population:
    """Return accuracy against length in these samples (sorted by task)."""
    tenths = _tenths(data)
    turn = bend(tenths)
    columns = _arrays(data, "task", "tokens", "correct")
    task, tokens, correct = columns
    found = Population(
        name=name,
        samples=len(tokens),
        correct=int(correct.sum()),
        tasks=data["task"].n_unique(),
        bins=_fixed_bins(data, config),
        tenths=tenths,
        correct_lengths=_spread(tokens[correct]),
        incorrect_lengths=_spread(tokens[~correct]),
        longer_if_incorrect=longer_if_incorrect(tokens, correct, task, seed=config.seed),
        pooled=pooled_odds_ratio(tokens, correct, task, config.unit_tokens),
        within=within_task(*columns, config),
    )
    if turn is None:
        return found
    start = turn[1].from_tokens
    later = _arrays(data.filter(pl.col("tokens") >= start), "task", "tokens", "correct")
    return found.model_copy(
        update={"past_turn": within_task(*later, config), "past_turn_from": start}
    )


def _arrays(data: pl.DataFrame, *names: str) -> tuple[Any, Any, Any]:
    first, second, third = (data[name].to_numpy() for name in names)
    return first, second, third


def length_and_speedup(data: pl.DataFrame, config: ObservationConfig) -> LengthAndSpeedup:
    """Return correlations of length and speedup, and the same within tasks.

    `data` are samples that have a speedup.
    """
    task, tokens, speedup = _arrays(data, "task", "tokens", "speedup")
    tasks, count = data["task"].n_unique(), len(tokens)
    none = unknown(f"{count} correct samples have a speedup", count, tasks)
    found = LengthAndSpeedup(
        label=config.speedup_label,
        samples=count,
        tasks=tasks,
        pearson=none,
        pearson_log=none,
        spearman=none,
        within=none,
    )
    if count < 4:
        return found
    log = np.log(speedup)
    within, sd = _within_speedup(task, tokens, log)
    apart = unknown("speeds of different tasks do not compare here", count, tasks)
    pooled = {
        name: apart
        if config.speedup_within_tasks_only
        else correlation(tokens, values, task, ranks=ranks, seed=config.seed)
        for name, values, ranks in (
            ("pearson", speedup, False),
            ("pearson_log", log, False),
            ("spearman", speedup, True),
        )
    }
    shown = np.random.default_rng(config.seed).permutation(count)[: config.points]
    points = tuple((float(tokens[i]), float(f"{speedup[i]:.5g}")) for i in np.sort(shown))
    rest = {"within": within, "sd_tokens": sd, "tenths": _speed_tenths(data), "points": points}
    return found.model_copy(update=pooled | rest)


def _within_speedup(task: Codes, tokens: Floats, log: Floats) -> tuple[Estimate, float | None]:
    codes, counts = np.unique(task, return_inverse=True, return_counts=True)[1:]
    keep = counts[codes] > 1
    codes = np.unique(codes[keep], return_inverse=True)[1]
    tasks, samples = int((counts > 1).sum()), int(keep.sum())
    if tasks < 2:
        why_not = f"{tasks} tasks have several correct samples with a speedup"
        return unknown(why_not, samples, tasks), None
    x = demeaned(tokens[keep], codes, tasks)
    sd = float(np.sqrt(np.sum(x**2) / (samples - tasks)))
    if sd == 0:
        return unknown("samples of one task are equally long", samples, tasks), None
    found = fixed_effects(x / sd, demeaned(log[keep], codes, tasks), codes, tasks)
    grown = {
        name: float(np.exp(value))
        for name in ("value", "lower", "upper")
        if (value := getattr(found, name)) is not None
    }
    return found.model_copy(update=grown if found.bounded else {}), sd


def _fixed_bins(data: pl.DataFrame, config: ObservationConfig) -> tuple[Bin, ...]:
    width = config.bin_tokens
    # the last bin begins at a whole multiple of the width
    last = -(-config.last_bin_tokens // width)
    place = (pl.col("tokens") // width).clip(upper_bound=last).cast(pl.Int64).alias("bin")
    return tuple(
        _bin(width * row["bin"], width * (row["bin"] + 1) if row["bin"] < last else None, row)
        for row in _counted(data.group_by(place)).sort("bin").iter_rows(named=True)
    )


def _tenths(data: pl.DataFrame) -> tuple[Bin, ...]:
    counts = _counted(
        data.with_columns(_tenth()).group_by("tenth"),
        pl.col("tokens").min().alias("from"),
        pl.col("tokens").max().alias("to"),
    )
    rows = counts.sort("tenth").iter_rows(named=True)
    return tuple(_bin(row["from"], row["to"] + 1.0, row) for row in rows)


def _tenth() -> pl.Expr:
    """0 to 9 by rank of the length: equal lengths stay together."""
    rank = (pl.col("tokens").rank("average") - 0.5) / pl.len()
    return (rank * 10).floor().clip(0, 9).cast(pl.Int64).alias("tenth")


def _counted(groups: GroupBy, *more: pl.Expr) -> pl.DataFrame:
    return groups.agg(
        pl.len().alias("samples"),
        pl.col("correct").sum(),
        pl.col("task").n_unique().alias("tasks"),
        *more,
    )


def _bin(first: float, end: float | None, row: dict[str, Any]) -> Bin:
    counts = {name: row[name] for name in ("samples", "correct", "tasks")}
    lower, upper = wilson(row["correct"], row["samples"])
    return Bin(
        from_tokens=float(first),
        to_tokens=None if end is None else float(end),
        accuracy=row["correct"] / row["samples"],
        lower=lower,
        upper=upper,
        **counts,
    )


def _speed_tenths(data: pl.DataFrame) -> tuple[SpeedTenth, ...]:
    if data.height < 50:
        return ()  # under five a tenth: the points show it all
    speedup = pl.col("speedup")
    found = (
        data.with_columns(_tenth())
        .group_by("tenth")
        .agg(
            pl.col("tokens").min().alias("from_tokens"),
            pl.col("tokens").max().alias("to_tokens"),
            pl.len().alias("samples"),
            speedup.log().mean().exp().alias("geometric_mean"),
            speedup.quantile(0.25).alias("p25"),
            speedup.quantile(0.75).alias("p75"),
        )
        .sort("tenth")
        .drop("tenth")
    )
    return tuple(SpeedTenth(**row) for row in found.iter_rows(named=True))


def _spread(tokens: Floats) -> Spread | None:
    from scipy.stats import quantile_test

    if not len(tokens):
        return None
    names = ("p10", "p25", "median", "p75", "p90")
    quantiles = dict(zip(names, np.quantile(tokens, [0.1, 0.25, 0.5, 0.75, 0.9]), strict=True))
    with quiet():
        test = quantile_test(tokens, q=quantiles["median"], p=0.5)
        bounds = test.confidence_interval(confidence_level=LEVEL)
    return Spread(
        samples=len(tokens),
        mean=float(tokens.mean()),
        median_lower=number(bounds.low),
        median_upper=number(bounds.high),
        **quantiles,
    )
