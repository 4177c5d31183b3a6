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

from kernels_eval.records import Json
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
from tasks.analysis.lengths import JudgedSamples, samples_of
from tasks.analysis.records import (
    Bin,
    LengthAndSpeedup,
    Observations,
    Population,
    SensitivityRow,
    SpeedTenth,
    Spread,
    Stratum,
)
from tasks.analysis.within import (
    demeaned,
    fixed_effects,
    ranks_and_sides,
    standardised,
    within_task,
)
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
    everything = population("all", data, config)
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
        everything=everything,
        complete=complete,
        strata=strata(samples),
        sensitivity=sensitivity(data, everything, complete, config),
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
    group, tokens, correct = _arrays(data, "correct")
    task = data["task"].to_numpy()
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
        within=within_task(group, tokens, correct, config),
    )


def strata(samples: JudgedSamples) -> tuple[Stratum, ...]:
    """Return the levels and token limits of the samples; empty where there is one."""
    found = (
        samples.data.group_by(name="stratum")
        .agg(
            samples=pl.len(),
            tasks=pl.col("task").n_unique(),
            correct=pl.col("correct").sum(),
            truncated=pl.col("truncated").sum() if samples.knows_truncation else None,
            longest_tokens=TOKENS.max(),
        )
        .sort("name")
    )
    return tuple(Stratum(**row) for row in found.iter_rows(named=True) if found.height > 1)


def sensitivity(
    data: pl.DataFrame,
    everything: Population,
    complete: Population | None,
    config: ObservationConfig,
) -> tuple[SensitivityRow, ...]:
    """Return the analysis within tasks on all samples, without short ones, on long ones only,
    without those cut off, and on each level and token limit alone."""
    names = data["stratum"].unique().sort().to_list()
    below, above = config.without_below_tokens, config.only_above_tokens
    parts = {
        f"without samples below {below:,} tokens": below <= TOKENS,
        f"only samples above {above:,} tokens": above < TOKENS,
        **{f"{name or 'neither'} alone": pl.col("stratum") == name for name in names},
    }
    rows = [SensitivityRow(name="all samples", samples=data.height, within=everything.within)]
    if complete is not None:
        row = {"name": "without samples cut off", "samples": complete.samples}
        rows.append(SensitivityRow(**row, within=complete.within))
    for name, kept in parts.items():
        part = data.filter(kept)
        if part.height < data.height:
            within = within_task(*_arrays(part, "correct"), config, permute=False)
            rows.append(SensitivityRow(name=name, samples=part.height, within=within))
    return tuple(rows)


def _arrays(data: pl.DataFrame, outcome: str) -> tuple[Codes, Floats, Any]:
    """The group that a sample is compared in, its length and its outcome."""
    return data["group"].to_numpy(), data["tokens"].to_numpy(), data[outcome].to_numpy()


def length_and_speedup(data: pl.DataFrame, config: ObservationConfig) -> LengthAndSpeedup:
    """Return correlations of length and speedup, and the same within tasks.

    `data` are samples that have a speedup.
    """
    group, tokens, speedup = _arrays(data, "speedup")
    basis = basis_of(data["task"].to_numpy())
    pooled, inner = ("pearson", "pearson_log", "spearman"), ("within", "within_ranks")
    none = basis.unknown(f"{basis.n} correct samples have a speedup")
    found: Json = dict.fromkeys((*pooled, *inner), none)
    if basis.n >= 4:
        shown = np.random.default_rng(config.seed).permutation(basis.n)[: config.points]
        found |= {
            "points": [(float(tokens[i]), float(f"{speedup[i]:.5g}")) for i in np.sort(shown)],
            "tenths": _speed_tenths(data),
        } | _within_speedup(group, tokens, np.log(speedup), config)
        if config.speedup_within_tasks_only:
            unknown = basis.unknown("speeds of different tasks do not compare here")
            found |= dict.fromkeys(pooled, unknown)
        else:
            found |= _pooled_speedup(data, config.seed)
    return LengthAndSpeedup(label=config.speedup_label, samples=basis.n, tasks=basis.tasks, **found)


def _pooled_speedup(data: pl.DataFrame, seed: int) -> Json:
    """The correlations of LengthAndSpeedup over tasks."""

    def of(part: pl.DataFrame, *, ranks: bool = False, log: bool = False) -> Estimate:
        tokens, speedup, task = (part[name].to_numpy() for name in ("tokens", "speedup", "task"))
        return correlation(
            tokens, np.log(speedup) if log else speedup, task, ranks=ranks, seed=seed
        )

    strata = data.partition_by("stratum", as_dict=True)
    return {
        "pearson": of(data),
        "pearson_log": of(data, log=True),
        "spearman": of(data, ranks=True),
        "strata": {
            str(name): of(part, ranks=True)
            for (name,), part in sorted(strata.items())
            if len(strata) > 1
        },
    }


def _within_speedup(task: Codes, tokens: Floats, log: Floats, config: ObservationConfig) -> Json:
    """`within`, `within_ranks` and `sd_tokens` of LengthAndSpeedup."""
    _, place, counts = np.unique(task, return_inverse=True, return_counts=True)
    keep = counts[place] > 1
    codes, x, sd, basis = standardised(task[keep], tokens[keep])
    if sd is None:
        reason = f"{basis.tasks} tasks have several correct samples with a speedup"
        if basis.tasks > 1:
            reason = "samples of one task are equally long"
        return dict.fromkeys(("within", "within_ranks"), basis.unknown(reason))
    found = fixed_effects(x, log[keep], codes)
    ranks, others = (
        demeaned(ranks_and_sides(codes, each[keep])[0], codes, basis.tasks)
        for each in (tokens, log)
    )
    by_rank = correlation(ranks, others, codes, ranks=False, seed=config.seed)
    by_rank = by_rank.model_copy(
        update={"p": None, "method": "Pearson of ranks within tasks, jackknife over tasks"}
    )
    if found.bounded:
        grown = {
            name: float(np.exp(value))
            for name, value in found.model_dump(include={"value", "lower", "upper"}).items()
        }
        found = found.model_copy(update=grown)
    return {"within": found, "within_ranks": by_rank, "sd_tokens": sd}


def _bins(data: pl.DataFrame, group: pl.Expr, start: pl.Expr, end: pl.Expr) -> tuple[Bin, ...]:
    """Samples by group; `start` and `end` give its first length, and the first after it."""
    counts = (
        data.with_columns(bin=group.cast(pl.Int64))
        .group_by("bin")
        .agg(
            start.cast(pl.Float64).alias("from_tokens"),
            end.cast(pl.Float64).alias("to_tokens"),
            pl.len().alias("samples"),
            pl.col("correct").sum(),
            tasks=pl.col("task").n_unique(),
            accuracy=pl.col("correct").mean(),
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
            from_tokens=TOKENS.min(),
            to_tokens=TOKENS.max(),
            samples=pl.len(),
            geometric_mean=speedup.log().mean().exp(),
            p25=speedup.quantile(0.25),
            p75=speedup.quantile(0.75),
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
