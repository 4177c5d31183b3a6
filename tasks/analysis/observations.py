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

from tasks.analysis.config import ObservationConfig
from tasks.analysis.estimates import (
    LEVEL,
    Codes,
    Floats,
    basis_of,
    correlation,
    longer_if_incorrect,
    number,
    pooled_odds_ratio,
    quiet,
    wilson,
)
from tasks.analysis.findings import cautions, findings, headline
from tasks.analysis.lengths import samples_of
from tasks.analysis.records import (
    Bin,
    LengthAndSpeedup,
    Observations,
    Population,
    SpeedTenth,
    Spread,
    bend,
)
from tasks.analysis.within import fixed_effects, standardised, within_task
from tasks.reporting.findings import Estimate

QUANTILES = {"p10": 0.1, "p25": 0.25, "median": 0.5, "p75": 0.75, "p90": 0.9}
TOKENS = pl.col("tokens")
# 0 to 9 by rank of the length: equal lengths stay together
TENTH = ((TOKENS.rank("average") - 0.5) / pl.len() * 10).floor().clip(0, 9)


def observe(frame: pl.DataFrame, config: ObservationConfig | None = None) -> Observations:
    """Return all observations of verdicts joined with their candidates.

    `lengths` names the columns read. Raises UsageError for a missing column and where no sample has
    both a length and an outcome; anything else that the data cannot say (no correct sample, one
    task, no speedup) is said in its place.
    """
    samples, config = samples_of(frame), config or ObservationConfig()
    data = samples.data
    cut = data.filter("truncated")
    complete = None
    if 0 < cut.height < data.height:
        complete = population("complete", data.filter(~pl.col("truncated")), config)
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
        complete=complete,
        speedup=length_and_speedup(data.drop_nulls("speedup"), config),
    )
    rows = findings(found)
    said = {"finding": (headline(rows[:2]),), "findings": rows, "cautions": cautions(found)}
    return found.model_copy(update=said)


def population(name: str, data: pl.DataFrame, config: ObservationConfig) -> Population:
    """Return accuracy against length in these samples (sorted by task)."""
    width = config.bin_tokens
    # the last bin begins at a whole multiple of the width
    last, place = -(-config.last_bin_tokens // width), pl.col("bin").first()
    end = pl.when(place < last).then((place + 1) * width)
    tenths = _bins(data, TENTH, TOKENS.min(), TOKENS.max() + 1)
    task, tokens, correct = _arrays(data, "correct")
    later: dict[str, Any] = {}
    if turn := bend(tenths):
        start = turn[1].from_tokens
        part = _arrays(data.filter(start <= TOKENS), "correct")
        later = {"past_turn": within_task(*part, config), "past_turn_from": start}
    return Population(
        name=name,
        samples=len(tokens),
        correct=int(correct.sum()),
        tasks=data["task"].n_unique(),
        bins=_bins(data, (TOKENS // width).clip(upper_bound=last), place * width, end),
        tenths=tenths,
        correct_lengths=_spread(tokens[correct]),
        incorrect_lengths=_spread(tokens[~correct]),
        longer_if_incorrect=longer_if_incorrect(tokens, correct, task, seed=config.seed),
        pooled=pooled_odds_ratio(tokens, correct, task, config.unit_tokens),
        within=within_task(task, tokens, correct, config),
        **later,
    )


def _arrays(data: pl.DataFrame, outcome: str) -> tuple[Codes, Floats, Any]:
    return data["task"].to_numpy(), data["tokens"].to_numpy(), data[outcome].to_numpy()


def length_and_speedup(data: pl.DataFrame, config: ObservationConfig) -> LengthAndSpeedup:
    """Return correlations of length and speedup, and the same within tasks.

    `data` are samples that have a speedup.
    """
    task, tokens, speedup = _arrays(data, "speedup")
    basis = basis_of(task)
    none = basis.unknown(f"{basis.n} correct samples have a speedup")
    found: dict[str, Any] = dict.fromkeys(("pearson", "pearson_log", "spearman", "within"), none)
    if basis.n >= 4:
        log = np.log(speedup)
        for name, values in {"pearson": speedup, "pearson_log": log, "spearman": speedup}.items():
            found[name] = basis.unknown("speeds of different tasks do not compare here")
            if not config.speedup_within_tasks_only:
                ranks = name == "spearman"
                found[name] = correlation(tokens, values, task, ranks=ranks, seed=config.seed)
        shown = np.random.default_rng(config.seed).permutation(basis.n)[: config.points]
        found |= {
            "points": [(float(tokens[i]), float(f"{speedup[i]:.5g}")) for i in np.sort(shown)],
            "tenths": _speed_tenths(data),
        }
        found["within"], found["sd_tokens"] = _within_speedup(task, tokens, log)
    return LengthAndSpeedup(label=config.speedup_label, samples=basis.n, tasks=basis.tasks, **found)


def _within_speedup(task: Codes, tokens: Floats, log: Floats) -> tuple[Estimate, float | None]:
    _, place, counts = np.unique(task, return_inverse=True, return_counts=True)
    keep = counts[place] > 1
    codes, x, sd, basis = standardised(task[keep], tokens[keep])
    if sd is None:
        why_not = f"{basis.tasks} tasks have several correct samples with a speedup"
        if basis.tasks > 1:
            why_not = "samples of one task are equally long"
        return basis.unknown(why_not), None
    found = fixed_effects(x, log[keep], codes)
    if not found.bounded:
        return found, sd
    grown = {
        name: float(np.exp(value))
        for name, value in found.model_dump(include={"value", "lower", "upper"}).items()
    }
    return found.model_copy(update=grown), sd


def _bins(data: pl.DataFrame, group: pl.Expr, start: pl.Expr, end: pl.Expr) -> tuple[Bin, ...]:
    """Samples by group; `start` and `end` give its first length, and the first after it."""
    counts = (
        data.with_columns(group.cast(pl.Int64).alias("bin"))
        .group_by("bin")
        .agg(
            start.cast(pl.Float64).alias("from_tokens"),
            end.cast(pl.Float64).alias("to_tokens"),
            pl.len().alias("samples"),
            pl.col("correct").sum(),
            pl.col("task").n_unique().alias("tasks"),
            pl.col("correct").mean().alias("accuracy"),
        )
        .sort("bin")
        .drop("bin")
    )
    found = []
    for row in counts.iter_rows(named=True):
        lower, upper = wilson(row["correct"], row["samples"])
        found.append(Bin(**row, lower=lower, upper=upper))
    return tuple(found)


def _speed_tenths(data: pl.DataFrame) -> tuple[SpeedTenth, ...]:
    if data.height < 50:
        return ()  # under five a tenth: the points show it all
    speedup = pl.col("speedup")
    found = (
        data.group_by(TENTH.alias("tenth"))
        .agg(
            TOKENS.min().alias("from_tokens"),
            TOKENS.max().alias("to_tokens"),
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
    quantiles = dict(zip(QUANTILES, np.quantile(tokens, [*QUANTILES.values()]), strict=True))
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
