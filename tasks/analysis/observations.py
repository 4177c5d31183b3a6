"""ConCuR's observations (arXiv 2510.07356) on any verified candidates: reasoning length against
correctness and against speedup.

Guarantees: pure; the same frame and configuration give the same record; every figure carries its n
and an interval, or says why it cannot be said; accuracy is analysed with the samples that the token
limit cut off and without them, pooled and within tasks. Does not guarantee a cause, nor that
Wilson's intervals hold over tasks: they treat samples as independent, as the paper's figure does,
and are for looking at. What the finding claims rests on intervals clustered by task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kernels_eval.records import Record
from tasks.analysis.config import ObservationConfig
from tasks.analysis.estimates import (
    LEVEL,
    Estimate,
    correlation,
    longer_if_incorrect,
    pooled_odds_ratio,
    quiet,
    unknown,
)
from tasks.analysis.lengths import Samples, samples_of
from tasks.analysis.within import WithinTask, demeaned, fixed_effects, within_task

if TYPE_CHECKING:
    import polars as pl


class Bin(Record):
    """Samples with from_tokens <= length < to_tokens (the last of the fixed bins is open: None).
    Wilson bounds, 95 %."""

    from_tokens: float
    to_tokens: float | None
    samples: int
    correct: int
    tasks: int
    accuracy: float
    lower: float
    upper: float


class Spread(Record):
    """Lengths of one outcome, in tokens; the bounds of the median are exact order statistics for
    independent samples (scipy)."""

    samples: int
    mean: float
    p10: float
    p25: float
    median: float
    p75: float
    p90: float
    median_lower: float | None = None
    median_upper: float | None = None


class Population(Record):
    """Accuracy against length: `all` samples, or the `complete` ones that the token limit did not
    cut off.

    `bins` have the paper's fixed width, `tenths` equal counts (ties stay together).
    `longer_if_incorrect` is the chance that a random incorrect sample is longer than a random
    correct one. `pooled` is the odds ratio per `unit_tokens`, tasks ignored. Where accuracy is not
    monotone in length, `past_turn` is the analysis within tasks once more, of samples from
    `past_turn_from` tokens
    on: the tenth of the peak (or trough) and what is longer.
    """

    name: str
    samples: int
    correct: int
    tasks: int
    bins: tuple[Bin, ...]
    tenths: tuple[Bin, ...]
    correct_lengths: Spread | None
    incorrect_lengths: Spread | None
    longer_if_incorrect: Estimate
    pooled: Estimate
    within: WithinTask
    past_turn: WithinTask | None = None
    past_turn_from: float | None = None


class SpeedTenth(Record):
    """Geometric mean and quartiles of the speedup (a ratio) in a tenth of the correct samples, by
    length."""

    from_tokens: float
    to_tokens: float
    samples: int
    geometric_mean: float
    p25: float
    p75: float


class LengthAndSpeedup(Record):
    """Of correct, timed samples. `within` is the factor on the speedup for a standard deviation
    (`sd_tokens`, within tasks) longer."""

    label: str
    samples: int
    tasks: int
    pearson: Estimate
    pearson_log: Estimate
    spearman: Estimate
    within: Estimate
    sd_tokens: float | None = None
    tenths: tuple[SpeedTenth, ...] = ()
    points: tuple[tuple[float, float], ...] = ()


class Observations(Record):
    """`rows` of the frame, of which `samples` were judged and measured; `left_out` counts the
    others by reason.

    `truncated` samples were cut off by the token limit (None where nothing says),
    `truncated_correct` of them are correct. `finding` says in plain words what the numbers support;
    `cautions` what bounds it.
    """

    rows: int
    samples: int
    tasks: int
    generators: tuple[str, ...]
    left_out: dict[str, int]
    length_unit: str
    unit_tokens: float
    truncated: int | None
    truncated_correct: int
    everything: Population
    complete: Population | None
    speedup: LengthAndSpeedup
    finding: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()


def observe(frame: pl.DataFrame, config: ObservationConfig | None = None) -> Observations:
    """All observations of verdicts joined with their candidates (tasks.curation.stage.joined;
    `lengths` names the columns read).

    Raises UsageError for a missing column and where no sample has both a length and an outcome;
    anything else that the data cannot say (no correct sample, one task, no speedup) is said in its
    place.
    """
    return observe_samples(samples_of(frame), config or ObservationConfig())


def observe_samples(samples: Samples, config: ObservationConfig) -> Observations:
    """`observe` for samples that are already prepared."""
    import polars as pl

    from tasks.analysis.findings import cautions, finding

    data = samples.data
    cut = data.filter(pl.col("truncated"))
    complete = samples.complete() if 0 < cut.height < data.height else None
    found = Observations(
        rows=samples.rows,
        samples=data.height,
        tasks=len(samples.task_ids),
        generators=tuple(
            sorted(str(name) for name in data["generator"].unique().to_list() if name)
        ),
        left_out=samples.left_out,
        length_unit=config.length_unit,
        unit_tokens=config.unit_tokens,
        truncated=cut.height if samples.knows_truncation else None,
        truncated_correct=int(cut["correct"].sum()),
        everything=population("all", data, config),
        complete=population("complete", complete, config) if complete is not None else None,
        speedup=length_and_speedup(data.filter(pl.col("speedup").is_not_null()), config),
    )
    return found.model_copy(update={"finding": finding(found), "cautions": cautions(found)})


def population(name: str, data: pl.DataFrame, config: ObservationConfig) -> Population:
    """Accuracy against length in these samples (sorted by task)."""
    import polars as pl

    from tasks.analysis.findings import bend

    tenths = _tenths(data)
    turn = bend(tenths)
    task, tokens, correct = (data[column].to_numpy() for column in ("task", "tokens", "correct"))
    right, wrong = tokens[correct], tokens[~correct]
    return Population(
        name=name,
        samples=len(tokens),
        correct=len(right),
        tasks=data["task"].n_unique(),
        bins=_fixed_bins(data, config),
        tenths=tenths,
        correct_lengths=_spread(right),
        incorrect_lengths=_spread(wrong),
        longer_if_incorrect=longer_if_incorrect(tokens, correct, task, seed=config.seed),
        pooled=pooled_odds_ratio(tokens, correct, task, config.unit_tokens),
        within=_within(data, config),
        past_turn=(
            _within(data.filter(pl.col("tokens") >= turn[1].from_tokens), config)
            if turn is not None
            else None
        ),
        past_turn_from=turn[1].from_tokens if turn is not None else None,
    )


def _within(data: pl.DataFrame, config: ObservationConfig) -> WithinTask:
    task, tokens, correct = (data[column].to_numpy() for column in ("task", "tokens", "correct"))
    return within_task(
        task,
        tokens,
        correct,
        unit_tokens=config.unit_tokens,
        max_conditional_tasks=config.max_conditional_tasks,
        permutations=config.permutations,
        permutation_budget=config.permutation_budget,
        seed=config.seed,
    )


def length_and_speedup(data: pl.DataFrame, config: ObservationConfig) -> LengthAndSpeedup:
    """Correlations of length and speedup over samples that have one, and the same within tasks with
    several such samples."""
    task, tokens, speedup = (data[column].to_numpy() for column in ("task", "tokens", "speedup"))
    facts = {
        "label": config.speedup_label,
        "samples": len(tokens),
        "tasks": data["task"].n_unique(),
    }
    if len(tokens) < 4:
        none = unknown(f"{len(tokens)} correct samples have a speedup", len(tokens), facts["tasks"])
        return LengthAndSpeedup(**facts, pearson=none, pearson_log=none, spearman=none, within=none)
    log = np.log(speedup)
    within, sd = _within_speedup(task, tokens, log)
    shown = np.random.default_rng(config.seed).permutation(len(tokens))[: config.points]
    if config.speedup_within_tasks_only:
        pearson = pearson_log = spearman = unknown(
            "speeds of different tasks do not compare here", len(tokens), facts["tasks"]
        )
    else:
        pearson = correlation(tokens, speedup, task, ranks=False, seed=config.seed)
        pearson_log = correlation(tokens, log, task, ranks=False, seed=config.seed)
        spearman = correlation(tokens, speedup, task, ranks=True, seed=config.seed)
    return LengthAndSpeedup(
        **facts,
        pearson=pearson,
        pearson_log=pearson_log,
        spearman=spearman,
        within=within,
        sd_tokens=sd,
        tenths=_speed_tenths(data),
        points=tuple((float(tokens[i]), float(f"{speedup[i]:.5g}")) for i in np.sort(shown)),
    )


def _within_speedup(
    task: np.ndarray, tokens: np.ndarray, log: np.ndarray
) -> tuple[Estimate, float | None]:
    codes, counts = np.unique(task, return_inverse=True, return_counts=True)[1:]
    keep = counts[codes] > 1
    codes = np.unique(codes[keep], return_inverse=True)[1]
    tasks, samples = int((counts > 1).sum()), int(keep.sum())
    if tasks < 2:
        return (
            unknown(f"{tasks} tasks have several correct samples with a speedup", samples, tasks),
            None,
        )
    x = demeaned(tokens[keep], codes, tasks)
    sd = float(np.sqrt(np.sum(x**2) / (samples - tasks)))
    if sd == 0:
        return unknown("samples of one task are equally long", samples, tasks), None
    found = fixed_effects(x / sd, demeaned(log[keep], codes, tasks), codes, tasks)
    if found.value is None or found.lower is None or found.upper is None:
        return found, sd
    grown = {
        name: float(np.exp(value))
        for name, value in (("value", found.value), ("lower", found.lower), ("upper", found.upper))
    }
    return found.model_copy(update=grown), sd


def _fixed_bins(data: pl.DataFrame, config: ObservationConfig) -> tuple[Bin, ...]:
    import polars as pl

    last = -(
        -config.last_bin_tokens // config.bin_tokens
    )  # its number; it begins at a whole multiple of the width
    number = (
        (pl.col("tokens") // config.bin_tokens).clip(upper_bound=last).cast(pl.Int64).alias("bin")
    )
    counts = _counted(data.group_by(number)).sort("bin")
    rows = []
    for row in counts.iter_rows(named=True):
        first = float(row["bin"] * config.bin_tokens)
        rows.append((first, first + config.bin_tokens if row["bin"] < last else None, row))
    return _bins(rows)


def _tenths(data: pl.DataFrame) -> tuple[Bin, ...]:
    import polars as pl

    counts = _counted(
        data.with_columns(_tenth()).group_by("tenth"),
        pl.col("tokens").min().alias("from"),
        pl.col("tokens").max().alias("to"),
    )
    rows = list(counts.sort("tenth").iter_rows(named=True))
    return _bins([(row["from"], row["to"] + 1.0, row) for row in rows])


def _tenth() -> pl.Expr:
    """0 to 9 by rank of the length: equal lengths stay together."""
    import polars as pl

    return (
        ((pl.col("tokens").rank("average") - 0.5) / pl.len() * 10).floor().clip(0, 9).cast(pl.Int64)
    ).alias("tenth")


def _counted(groups: object, *more: pl.Expr) -> pl.DataFrame:
    import polars as pl

    return groups.agg(  # type: ignore[attr-defined]
        pl.len().alias("samples"),
        pl.col("correct").sum().alias("right"),
        pl.col("task").n_unique().alias("tasks"),
        *more,
    )


def _bins(rows: list[tuple[float, float | None, dict]]) -> tuple[Bin, ...]:
    from statsmodels.stats.proportion import proportion_confint

    found = []
    for first, end, row in rows:
        lower, upper = proportion_confint(
            row["right"], row["samples"], alpha=1 - LEVEL, method="wilson"
        )
        facts = {
            "from_tokens": first,
            "to_tokens": end,
            "samples": row["samples"],
            "correct": row["right"],
            "tasks": row["tasks"],
        }
        # rounding must not put a share of 0 or 1 outside its own interval
        bounds = {
            "lower": max(0.0, min(float(lower), row["right"] / row["samples"])),
            "upper": min(1.0, max(float(upper), row["right"] / row["samples"])),
        }
        found.append(Bin(**facts, accuracy=row["right"] / row["samples"], **bounds))
    return tuple(found)


def _speed_tenths(data: pl.DataFrame) -> tuple[SpeedTenth, ...]:
    import polars as pl

    if data.height < 50:
        return ()  # under five a tenth: the points say it all
    found = (
        data.with_columns(_tenth())
        .group_by("tenth")
        .agg(
            pl.col("tokens").min().alias("from_tokens"),
            pl.col("tokens").max().alias("to_tokens"),
            pl.len().alias("samples"),
            pl.col("speedup").log().mean().exp().alias("geometric_mean"),
            pl.col("speedup").quantile(0.25).alias("p25"),
            pl.col("speedup").quantile(0.75).alias("p75"),
        )
        .sort("tenth")
        .drop("tenth")
    )
    return tuple(SpeedTenth(**row) for row in found.iter_rows(named=True))


def _spread(tokens: np.ndarray) -> Spread | None:
    from scipy.stats import quantile_test

    if not len(tokens):
        return None
    p10, p25, median, p75, p90 = (
        float(x) for x in np.quantile(tokens, [0.1, 0.25, 0.5, 0.75, 0.9])
    )
    with quiet():
        bounds = quantile_test(tokens, q=median, p=0.5).confidence_interval(confidence_level=LEVEL)
    lower, upper = (
        float(bound) if np.isfinite(bound) else None for bound in (bounds.low, bounds.high)
    )
    facts = {
        "samples": len(tokens),
        "mean": float(tokens.mean()),
        "p10": p10,
        "p25": p25,
        "median": median,
        "p75": p75,
        "p90": p90,
    }
    return Spread(**facts, median_lower=lower, median_upper=upper)
