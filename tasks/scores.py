"""Scores of verdicts: Exec and fast_p at pass@k, and the geometric-mean speedup
(docs/explanation/statistics.md).

Guarantees: duplicate candidates and mixed devices are refused; tasks with failing references are
left out; unsupported values are null with a reason. Rejected kernels are never timed, so fast_p
with p > 0 on the track "any" is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from statistics import NormalDist
from typing import Literal, NamedTuple, get_args

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kernels_eval.errors import UsageError
from kernels_eval.records import Reason, Status
from tasks.tables import CORRECT, RIGHT_BY_TORCH, TASK_ERROR, unconfirmed

Track = Literal["any", "custom_kernel"]
"""Right outputs whoever computed them, or only where a custom kernel did the work."""
TRACKS: tuple[Track, ...] = get_args(Track)
Baseline = Literal["eager", "compile"]
"""What a speedup is against: the reference as it is written, or under torch.compile."""
BASELINES: tuple[Baseline, ...] = get_args(Baseline)
EXEC, GEOMETRIC_MEAN, KERNEL_SHARE = "exec", "geometric_mean_speedup", "kernel_share"
SHARE_COLUMN = "custom_kernel_time_share"
COLUMNS = ("task_id", "status", "reason", "outputs_match", "timing")
RESAMPLES = 2000
FEWEST_TASKS = 5
"""Tasks that an interval of a mean over correct samples takes: docs/explanation/statistics.md."""
TAIL = 0.025
"""What lies beyond either end of an interval that holds with 95 %."""

_DRAWS_AT_ONCE = 1_000_000
_DRAWS = 4_000_000
_NEVER_REACHED = (Status.COMPILE_ERROR, Status.NO_CODE, Status.REJECTED)
_REACHED = [status.value for status in Status if status not in _NEVER_REACHED]
"""Statuses of candidates whose reference was run."""


def scores(
    frame: pl.DataFrame,
    *,
    by: Sequence[str] = ("model",),
    ks: Sequence[int] = (1,),
    ps: Sequence[float] = (1.0,),
    track: Track = "custom_kernel",
    baseline: Baseline = "eager",
    resamples: int = RESAMPLES,
) -> pl.DataFrame:
    """One row per group, metric and k: `by`, track, baseline, metric, k, tasks, samples, missing,
    value, lower, upper, why_not.

    `frame` has one row per verdict, with `by` and COLUMNS; `candidate_id` and `device` are checked
    if present. Metrics are "exec" and "fast_P" for each of `ps` (shares of tasks in [0, 1]) and
    "geometric_mean_speedup" (a ratio, k null) over correct, timed samples. Where the frame has
    SHARE_COLUMN, "kernel_share" is the mean of it over those samples whose share is known: what of
    that speedup is of their own kernels. `lower` and `upper` are
    95 % bounds: `_share_interval` for shares, a bootstrap over tasks with `resamples` draws (0:
    none) for the mean. A value that cannot be estimated is null with a `why_not`; so are
    bounds of a mean over fewer than FEWEST_TASKS tasks. `missing` counts tasks that only other
    models of the group answered.

    The `baseline` "compile" has only metrics that compare times, over tasks timed under
    torch.compile. Raises UsageError for a missing column, a model's duplicate candidate, and
    verdicts of two devices.
    """
    keys = list(by)
    samples = scorable(frame, keys, baseline)
    rates = task_rates(samples, by=keys, ks=ks, ps=ps, track=track, baseline=baseline)
    means = [GEOMETRIC_MEAN, *([KERNEL_SHARE] if SHARE_COLUMN in frame.columns else [])]
    found = pl.concat(
        [_shares(rates, keys), *(_means(samples, keys, name, track, resamples) for name in means)],
        how="diagonal",
    )
    names = _metrics(ps, track, baseline)
    metrics = [*product(names, ks), *((name, None) for name in means)]
    schema = {"metric": pl.String, "k": pl.Int64}
    rows = frame.select(keys).unique(maintain_order=True)
    rows = rows.join(pl.DataFrame(metrics, schema, orient="row"), how="cross")
    rows = rows.join(
        _counts(samples, keys), on=keys, how="left", nulls_equal=True, maintain_order="left"
    )
    rows = rows.join(
        found, on=[*keys, "metric", "k"], how="left", nulls_equal=True, maintain_order="left"
    )
    rows = rows.with_columns(
        pl.col("tasks", "samples", "missing").fill_null(0).cast(pl.Int64), why_not=_why_not()
    )
    if baseline == "compile":
        rows = _without_uncompared(rows, frame, keys)
    return rows.select(
        *keys,
        pl.lit(track).alias("track"),
        pl.lit(baseline).alias("baseline"),
        *("metric", "k", "tasks", "samples", "missing", "value", "lower", "upper", "why_not"),
    )


def task_rates(
    samples: pl.DataFrame,
    *,
    by: Sequence[str],
    ks: Sequence[int],
    ps: Sequence[float],
    track: Track,
    baseline: Baseline = "eager",
) -> pl.DataFrame:
    """pass@k of every task: `by`, task_id, metric, k, n (samples), rate (null where n < k).

    `samples` is what `scorable` returns.
    """
    metrics = _metrics(ps, track, baseline)
    passed = samples.group_by(*by, "task_id", maintain_order=True).agg(
        pl.len().cast(pl.Int64).alias("n"),
        *(passes.sum().cast(pl.Int64).alias(name) for name, passes in metrics.items()),
    )
    counts = passed.unpivot(
        list(metrics), index=[*by, "task_id", "n"], variable_name="metric", value_name="c"
    )
    counts = counts.join(pl.DataFrame({"k": list(ks)}, {"k": pl.Int64}), how="cross")
    cases = counts.select("n", "c", "k").unique().filter(pl.col("n") >= pl.col("k"))
    rates = pl.Series("rate", [pass_at_k(*case) for case in cases.iter_rows()], pl.Float64)
    return counts.join(
        cases.with_columns(rates), on=["n", "c", "k"], how="left", maintain_order="left"
    ).drop("c")


def right_samples(
    frame: pl.DataFrame, by: Sequence[str], track: Track, baseline: Baseline
) -> pl.DataFrame:
    """How many samples that count are right on a track: `by`, track, baseline, right."""
    samples = scorable(frame, by, baseline)
    counts = samples.group_by(by, maintain_order=True).agg(right=_right(track).sum())
    return counts.with_columns(track=pl.lit(track), baseline=pl.lit(baseline))


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right, where c of n were: 1 - C(n -
    c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, equation 1). Raises ValueError unless 0 <=
    c <= n and 1 <= k <= n."""
    if not 0 <= c <= n:
        raise ValueError(f"c = {c} right of n = {n} samples")
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be estimated from n = {n} samples")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def metric_name(p: float | None) -> str:
    """ "exec" for None, else "fast_0", "fast_0.5", "fast_1", ..."""
    return EXEC if p is None else f"fast_{p:g}"


# -- which verdicts count --------------------------------------------------------------------------


def scorable(frame: pl.DataFrame, by: Sequence[str], baseline: Baseline = "eager") -> pl.DataFrame:
    """The verdicts that count, by task, with `speedup` (0: no valid one). An unconfirmed one has no
    status, and counts as not right.

    Raises UsageError as `scores` does.
    """
    if missing := [name for name in (*by, *COLUMNS) if name not in frame.columns]:
        raise UsageError(
            f"scoring needs the columns {', '.join(missing)}", "join verdicts with a column `model`"
        )
    _require_one_device(frame)
    _require_each_once(frame, by)
    left_out = excluded_tasks(frame)
    path = ["speedup"]
    if baseline == "compile":
        left_out += uncompiled_tasks(frame)
        path = ["compiled", "speedup"]
    ratio = nested(frame, "timing", *path).cast(pl.Float64)
    valid = (ratio > 0) & ratio.is_finite()
    samples = frame.filter(~pl.col("task_id").is_in(left_out)).with_columns(
        pl.when(~unconfirmed(frame)).then(name).alias(name) for name in ("status", "outputs_match")
    )
    return samples.with_columns(speedup=pl.when(valid).then(ratio).otherwise(0.0)).sort(
        "task_id", maintain_order=True
    )


def without_fig_leaves(frame: pl.DataFrame, least: float | None) -> pl.DataFrame:
    """The verdicts; with `least`, correct ones whose own kernels take less of their time, or an
    unknown share, are `no_custom_kernel`, which the track "any" counts.

    Raises UsageError where a share is asked for and the verdicts have none.
    """
    if least is None:
        return frame
    if SHARE_COLUMN not in frame.columns:
        raise UsageError(
            f"min_kernel_share asks for the column {SHARE_COLUMN}, and the verdicts have none",
            "leave it out, or verify with concur",
        )
    fig_leaf = CORRECT & (pl.col(SHARE_COLUMN).fill_null(0.0) < least)
    reason = Reason.NO_CUSTOM_KERNEL
    refused = {"status": reason.status.value, "reason": reason.value, "outputs_match": True}
    return frame.with_columns(
        pl.when(fig_leaf.fill_null(False)).then(pl.lit(value)).otherwise(name).alias(name)
        for name, value in refused.items()
    )


def excluded_tasks(frame: pl.DataFrame) -> list[str]:
    """Sorted tasks whose reference fails or is degenerate for most candidates that reached it, over
    all models."""
    reached = frame.filter(pl.col("status").is_in(_REACHED)).group_by("task_id")
    counts = reached.agg(TASK_ERROR.sum().alias("broken"), pl.len())
    return sorted(counts.filter(2 * pl.col("broken") > pl.col("len"))["task_id"].to_list())


def uncompiled_tasks(frame: pl.DataFrame) -> list[str]:
    """Sorted tasks whose compiled reference was asked for and never timed."""
    asked = frame.filter(_timed(frame)).select(
        "task_id",
        asked=nested(frame, "timing", "compiled", "mode").is_not_null(),
        known=nested(frame, "timing", "compiled", "speedup").is_not_null(),
    )
    of_task = asked.group_by("task_id").agg(pl.col("asked", "known").any())
    return sorted(of_task.filter("asked", ~pl.col("known"))["task_id"].to_list())


def baselines_of(frame: pl.DataFrame) -> tuple[Baseline, ...]:
    """ "eager", and "compile" where at least one verdict was timed against it."""
    known = nested(frame, "timing", "compiled", "speedup").is_not_null()
    measured = not frame.filter(_timed(frame), known).is_empty()
    return BASELINES if measured else BASELINES[:1]


def nested(frame: pl.DataFrame, column: str, *fields: str) -> pl.Expr:
    """A field inside a struct column; null where the table has no such field."""
    value = pl.col(column)
    kind: object = frame.schema[column]
    for field in fields:
        members = kind.to_schema() if isinstance(kind, pl.Struct) else {}
        if field not in members:
            return pl.lit(None)
        value = value.struct.field(field)
        kind = members[field]
    return value


def known_ratio(frame: pl.DataFrame, name: str) -> pl.Expr:
    """A `timing` field; null where missing, or not a finite number above 0 (not timed)."""
    value = nested(frame, "timing", name).cast(pl.Float64)
    return pl.when(value.is_finite() & (value > 0)).then(value)


def _timed(frame: pl.DataFrame) -> pl.Expr:
    return nested(frame, "timing", "speedup").is_not_null()


def _right(track: Track) -> pl.Expr:
    correct = CORRECT.fill_null(False)
    if track == "custom_kernel":
        return correct
    return correct | RIGHT_BY_TORCH.fill_null(False)


def _metrics(ps: Sequence[float], track: Track, baseline: Baseline) -> dict[str, pl.Expr]:
    """Pass conditions by metric; an untimed correct sample has only speedup > 0."""
    right = _right(track)
    fast = {metric_name(p): right & (pl.col("speedup") > p) for p in ps if p > 0}
    if baseline == "compile":
        return fast
    named = {metric_name(p): fast.get(metric_name(p), right) for p in ps}
    return {EXEC: right, **named}


def _require_each_once(frame: pl.DataFrame, by: Sequence[str]) -> None:
    if "candidate_id" not in frame.columns:
        return
    keys = ["candidate_id", *by]
    twice = frame.group_by(keys).len().filter(pl.col("len") > 1).sort(keys)
    if twice.is_empty():
        return
    candidate, *group, count = twice.row(0)
    named = ", ".join(f"{name} {value!r}" for name, value in zip(by, group, strict=True))
    raise UsageError(
        f"{twice.height:,} candidates are there more than once, such as {candidate!r} of {named}"
        f" ({count} times): each would be counted as several samples",
        'read snapshots with unique="candidate_id", or drop repeated rows with'
        ' frame.unique(["model", "candidate_id"])',
    )


def _require_one_device(frame: pl.DataFrame) -> None:
    if "device" not in frame.columns:
        return
    # a verdict without a device never reached one: it did not compile, say
    devices = frame.filter(pl.col("device").fill_null("") != "")["device"].value_counts()
    if devices.height > 1:
        named = "; ".join(f"{name} ({n:,})" for name, n in devices.sort("device").iter_rows())
        raise UsageError(
            f"verdicts of {devices.height} devices are mixed: {named}. Speedups on different"
            " devices do not compare",
            "choose one with --device NAME, or score each verification snapshot by itself (its"
            " manifest.json names its device)",
        )


# -- rows ------------------------------------------------------------------------------------------


def _counts(samples: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    counts = samples.group_by(by).agg(
        tasks=pl.col("task_id").n_unique().cast(pl.Int64), samples=pl.len().cast(pl.Int64)
    )
    others = [name for name in by if name != "model"]
    if "model" not in by:
        return counts.with_columns(missing=pl.lit(0))
    if not others:
        every = samples["task_id"].n_unique()
        return counts.with_columns(missing=every - pl.col("tasks"))
    every_task = samples.group_by(others).agg(every=pl.col("task_id").n_unique().cast(pl.Int64))
    known = counts.join(every_task, on=others, how="left", nulls_equal=True)
    return known.with_columns(missing=pl.col("every") - pl.col("tasks")).drop("every")


def _shares(rates: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    short = pl.col("n") < pl.col("k")
    rate = pl.col("rate")
    found = rates.group_by(*by, "metric", "k", maintain_order=True).agg(
        count=pl.len().cast(pl.Int64),
        short=short.sum().cast(pl.Int64),
        least=pl.col("n").min(),
        value=pl.when(~short.any()).then(rate.mean()),
        total=rate.sum(),
        squares=rate.pow(2).sum(),
    )
    lower, upper = _share_interval(
        *(found[name].to_numpy() for name in ("count", "total", "squares"))
    )
    known = pl.col("value").is_not_null()
    return found.with_columns(
        lower=pl.when(known).then(pl.Series(lower)), upper=pl.when(known).then(pl.Series(upper))
    ).drop("count", "total", "squares")


def _means(
    samples: pl.DataFrame, by: list[str], metric: str, track: Track, resamples: int
) -> pl.DataFrame:
    geometric = metric == GEOMETRIC_MEAN
    each = pl.col("speedup").log() if geometric else pl.col(SHARE_COLUMN).cast(pl.Float64)
    counted = _right(track) & (pl.col("speedup") > 0) & each.is_finite().fill_null(False)
    per_task = samples.group_by(*by, "task_id", maintain_order=True).agg(
        total=each.filter(counted).sum(), timed=counted.sum().cast(pl.Int64)
    )
    rows = []
    for group, tasks in per_task.group_by(by, maintain_order=True):
        totals, timed = tasks["total"].to_numpy(), tasks["timed"].to_numpy()
        bounds = None
        # few tasks with a correct sample cannot say how much tasks differ
        spread = int(np.count_nonzero(timed))
        if resamples and spread >= FEWEST_TASKS:
            means = resampled_means(totals, timed, resamples=resamples)
            bounds = percentile_interval(np.exp(means) if geometric else means, len(totals))
        value = totals.sum() / timed.sum() if timed.any() else None
        if geometric and value is not None:
            value = math.exp(value)
        few = spread if resamples and spread < FEWEST_TASKS else None
        rows.append((*group, metric, value, *(bounds or (None, None)), few))
    schema = {name: samples.schema[name] for name in by}
    numbers = dict.fromkeys(("value", "lower", "upper", "few"), pl.Float64)
    found = pl.DataFrame(rows, {**schema, "metric": pl.String, **numbers}, orient="row")
    return found.with_columns(k=pl.lit(None, pl.Int64))


def _why_not() -> pl.Expr:
    short = pl.format(
        "pass@{} needs {} samples of each task; {} of {} tasks have fewer (the least: {})",
        *("k", "k", "short", "tasks", "least"),
    )
    few = pl.format(
        f"no interval of the speedup: it takes {FEWEST_TASKS} tasks with a correct, timed sample,"
        " not {}",
        pl.col("few").cast(pl.Int64),
    )
    return (
        pl.when(pl.col("value").is_not_null())
        .then(pl.coalesce(few, pl.lit("")))
        .when(pl.col("metric") == GEOMETRIC_MEAN)
        .then(pl.lit("no correct, timed sample"))
        .when(pl.col("metric") == KERNEL_SHARE)
        .then(pl.lit("no correct, timed sample whose kernels' share of the time is known"))
        .when(pl.col("short") > 0)
        .then(short)
        .otherwise(pl.lit("no task to score"))
    )


def _without_uncompared(rows: pl.DataFrame, frame: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    never = _timed(frame) & nested(frame, "timing", "compiled", "mode").is_null()
    counts = frame.group_by(by).agg(never.sum().alias("never"))
    rows = rows.join(counts, on=by, how="left", nulls_equal=True, maintain_order="left")
    why = pl.format("{} of its timed samples were not timed against torch.compile", "never")
    return without_values(rows, pl.col("never") > 0, why)


def without_values(rows: pl.DataFrame, where: pl.Expr, why: pl.Expr) -> pl.DataFrame:
    """Scores without their values and bounds in some rows, and `why_not` there."""
    return rows.with_columns(
        *(pl.when(~where).then(name).alias(name) for name in ("value", "lower", "upper")),
        pl.when(where).then(why).otherwise("why_not").alias("why_not"),
    )


# -- intervals over tasks --------------------------------------------------------------------------


class Interval(NamedTuple):
    """A closed confidence interval."""

    lower: float
    upper: float


Floats = NDArray[np.float64]


def wilson_interval(successes: int, trials: int) -> Interval:
    """Wilson's score interval of a share of independent trials (Wilson 1927)."""
    lower, upper = wilson_intervals(np.array([successes]), np.array([trials]))
    return Interval(float(lower[0]), float(upper[0]))


def wilson_intervals(
    successes: NDArray[np.int64], trials: NDArray[np.int64]
) -> tuple[Floats, Floats]:
    """`wilson_interval` of many shares, widened against rounding to contain shares of 0 and 1."""
    from statsmodels.stats.proportion import proportion_confint

    share = successes / trials
    lower, upper = proportion_confint(successes, trials, alpha=2 * TAIL, method="wilson")
    return np.clip(lower, 0.0, share), np.clip(upper, share, 1.0)


def _share_interval(tasks: NDArray[np.int64], total: Floats, squares: Floats) -> Floats:
    """Bounds (2, groups) of mean rates: Student's t with two tasks added at 0 and two at 1, cut to
    [0, 1] (after Agresti and Coull 1998)."""
    from scipy.special import stdtrit

    count = tasks + 4
    centre = (total + 2) / count
    variance = (squares + 2 - count * centre**2) / (count - 1)
    margin = -stdtrit(count - 1, TAIL) * np.sqrt(variance / count)
    bounds: Floats = np.clip([centre - margin, centre + margin], 0.0, 1.0)
    return bounds


def resampled_means(
    totals: Floats, counts: NDArray[np.int64], *, seed: int = 0, resamples: int = RESAMPLES
) -> Floats:
    """Means of `resamples` draws of whole tasks with replacement (cluster bootstrap; Efron and
    Tibshirani 1993, chapter 13).

    `totals` and `counts`, shape (tasks,), are sums and numbers of a task's values. Raises
    ValueError without tasks.
    """
    tasks = len(totals)
    if not tasks:
        raise ValueError("no tasks to resample")
    generator = np.random.default_rng(seed)
    at_once = max(1, _DRAWS_AT_ONCE // tasks)
    means = []
    for start in range(0, resamples, at_once):
        size = (min(at_once, resamples - start), tasks)
        draws = generator.integers(0, tasks, size=size)
        number = counts[draws].sum(axis=1)
        drawn = number > 0
        means.append(totals[draws].sum(axis=1)[drawn] / number[drawn])
    return np.concatenate(means)


def affordable_resamples(tasks: int) -> int:
    """Resamples in about a tenth of a second: all `RESAMPLES` of 2,000 tasks, 220 of 18,162."""
    return max(200, min(RESAMPLES, _DRAWS // max(1, tasks)))


def percentile_interval(results: Floats, tasks: int) -> Interval | None:
    """Expanded percentile interval of resampled results (Hesterberg 2015, arXiv 1411.5279):
    percentiles move outwards to Phi(-sqrt(n / (n - 1)) t), t of n - 1 degrees of freedom. None
    where resamples do not differ."""
    from scipy.special import stdtrit

    if not len(results) or results.min() == results.max():
        return None
    tail = TAIL
    if tasks > 1:
        tail = NormalDist().cdf(math.sqrt(tasks / (tasks - 1)) * float(stdtrit(tasks - 1, TAIL)))
    lower, upper = np.quantile(results, [tail, 1 - tail])
    return Interval(float(lower), float(upper))
