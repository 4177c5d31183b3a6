"""Scores of models on a benchmark: Exec and fast_p at pass@k, geometric-mean speedup, each with an interval over tasks.

Guarantees: both tracks for every model ("custom_kernel": a custom kernel does the work; "any": the outputs are right whoever computed
them); a number that the samples cannot support is None, never a guess; every model of one frame is scored on tasks whose reference works.
Does not guarantee that an interval covers the truth for a handful of tasks: it says how much these tasks disagree, not how unlike other
tasks they are. Rejected kernels are never timed, so fast_p with p > 0 of the track "any" is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from kernels_eval.errors import UsageError
from kernels_eval.metrics import Interval, bootstrap_interval, mean, pass_at_k, wilson_interval
from kernels_eval.records import Record

if TYPE_CHECKING:
    import polars as pl

Track = Literal["any", "custom_kernel"]
TRACKS: tuple[Track, ...] = get_args(Track)
COLUMNS = ("model", "task_id", "status", "reason", "outputs_match", "timing")
GEOMETRIC_MEAN = "geometric_mean_speedup"
LEVEL = 0.95


class ScoreRow(Record):
    """One number of one model on one track. Rates are shares in [0, 1], the geometric mean is a ratio; both are None where unsupported.

    `lower` and `upper` bound `value` with 95 % confidence by the named method: a percentile bootstrap over tasks, or Wilson's interval with
    one trial a task where all tasks agree and the bootstrap would collapse to a point.
    """

    model: str
    track: Track
    metric: str
    k: int | None = None
    value: float | None = None
    lower: float | None = None
    upper: float | None = None
    interval: Literal["bootstrap", "wilson"] | None = None
    tasks: int
    samples: int


class ComparisonRow(Record):
    """`model` minus `baseline` on the tasks both answered: shares in [-1, 1], interval from a bootstrap over task pairs.

    The bounds are None where every task shows the same difference (all zero, say): such data cannot say how sure it is.
    """

    model: str
    baseline: str
    track: Track
    metric: str
    k: int
    difference: float
    lower: float | None = None
    upper: float | None = None
    tasks: int


class _Sample(Record):
    """What scoring needs of one verdict: right per track, and how fast (0 where not timed)."""

    custom: bool
    any: bool
    speedup: float

    def passes(self, track: Track, p: float | None) -> bool:
        """Exec for p None; else correct with speedup > p. Of a correct sample without a timing only speedup > 0 is known."""
        right = self.custom if track == "custom_kernel" else self.any
        return right and (not p or self.speedup > p)


_Samples = Mapping[str, Sequence[_Sample]]


def metric_name(p: float | None) -> str:
    """ "exec" for None, else "fast_0", "fast_0.5", "fast_1", ..."""
    return "exec" if p is None else f"fast_{p:g}"


def score(frame: pl.DataFrame, *, ks: Sequence[int], ps: Sequence[float], seed: int = 0, resamples: int = 2000) -> list[ScoreRow]:
    """All scores of all models, by model (in order of first appearance), track, metric and k.

    `frame` has one row per verdict with a column `model` beside those of tasks.schemas.VERDICTS (`COLUMNS` names those read). pass@k is the
    unbiased estimator per task (Chen et al. 2021), averaged over tasks; for fast_p at k, a sample passes when speedup > p. With k above the
    number of samples of any task the row is there with value None. The geometric mean is over all correct, timed samples of all tasks
    (k None). A task with a `task_error` is left out for every model (`excluded_tasks` lists them). Raises UsageError for a missing column.
    """
    rows: list[ScoreRow] = []
    for model, samples in _by_model(frame).items():
        total = sum(len(group) for group in samples.values())
        facts: dict[str, Any] = {"model": model, "tasks": len(samples), "samples": total}
        for track in TRACKS:
            for p in (None, *ps):
                for k in ks:
                    rates = _rates(samples, track, p, k)
                    rows.append(ScoreRow(**facts, track=track, metric=metric_name(p), k=k, **_rate_with_interval(rates, seed, resamples)))
            rows.append(ScoreRow(**facts, track=track, metric=GEOMETRIC_MEAN, **_geometric_mean(samples, track, seed, resamples)))
    return rows


def compare(
    frame: pl.DataFrame, *, baseline: str, model: str, ks: Sequence[int], ps: Sequence[float], seed: int = 0, resamples: int = 2000
) -> list[ComparisonRow]:
    """Exec and fast_p of `model` minus those of `baseline`, task by task, on both tracks. Metrics that either cannot support are left out.

    Raises UsageError for a missing column or a model that is not in the frame.
    """
    known = _by_model(frame)
    for name in (baseline, model):
        if name not in known:
            raise UsageError(f"no verdicts of model {name!r}", f"models in this frame: {', '.join(known) or 'none'}")
    shared = [task for task in known[model] if task in known[baseline]]
    ours, theirs = ({task: known[name][task] for task in shared} for name in (model, baseline))
    rows = []
    for track, p, k in ((track, p, k) for track in TRACKS for p in (None, *ps) for k in ks):
        a, b = _rates(ours, track, p, k), _rates(theirs, track, p, k)
        if a is None or b is None:
            continue
        lower, upper = bootstrap_interval(a - b, mean, seed=seed, resamples=resamples, level=LEVEL) or (None, None)
        facts = {"model": model, "baseline": baseline, "track": track, "metric": metric_name(p), "k": k, "tasks": len(shared)}
        rows.append(ComparisonRow(**facts, difference=mean(a - b), lower=lower, upper=upper))
    return rows


def excluded_tasks(frame: pl.DataFrame) -> list[str]:
    """Tasks whose reference fails or is degenerate for any candidate: no model can be judged on them. Sorted."""
    import polars as pl

    return sorted(frame.filter(pl.col("status") == "task_error")["task_id"].unique().to_list())


def _by_model(frame: pl.DataFrame) -> dict[str, dict[str, list[_Sample]]]:
    """model -> task_id -> samples, tasks sorted so that bootstrap draws pair up between models."""
    missing = [name for name in COLUMNS if name not in frame.columns]
    if missing:
        raise UsageError(f"scoring needs the columns {', '.join(missing)}", "join verdicts with a column `model`")
    excluded = set(excluded_tasks(frame))
    found: dict[str, dict[str, list[_Sample]]] = {}
    for row in _rows(frame):
        tasks = found.setdefault(row["model"], {})
        if row["task_id"] not in excluded:
            tasks.setdefault(row["task_id"], []).append(_sample(row))
    return {model: dict(sorted(tasks.items())) for model, tasks in found.items()}


def _rows(frame: pl.DataFrame) -> Iterator[dict[str, Any]]:
    return frame.select(COLUMNS).iter_rows(named=True)


def _sample(row: Mapping[str, Any]) -> _Sample:
    """Mirrors Verdict.correct_any, Verdict.correct_custom and Verdict.speedup."""
    custom = row["status"] == "correct"
    alien = row["status"] == "rejected" and row["reason"] == "no_custom_kernel" and row["outputs_match"] is True
    return _Sample(custom=custom, any=custom or alien, speedup=(row["timing"] or {}).get("speedup") or 0.0)


def _rates(samples: _Samples, track: Track, p: float | None, k: int) -> NDArray[np.float64] | None:
    """pass@k per task, shape (tasks,); None where there are no tasks or one has fewer than k samples."""
    if not samples or any(len(group) < k for group in samples.values()):
        return None
    return np.array([pass_at_k(len(group), sum(s.passes(track, p) for s in group), k) for group in samples.values()])


def _rate_with_interval(rates: NDArray[np.float64] | None, seed: int, resamples: int) -> dict[str, Any]:
    if rates is None:
        return {}
    value = mean(rates)
    interval = bootstrap_interval(rates, mean, seed=seed, resamples=resamples, level=LEVEL)
    if interval is not None:
        return _bounds(value, interval, "bootstrap")
    return _bounds(value, wilson_interval(min(value, 1.0) * len(rates), len(rates), LEVEL), "wilson")


def _geometric_mean(samples: _Samples, track: Track, seed: int, resamples: int) -> dict[str, Any]:
    """Over all passing, timed samples. Per task only the sum of logs and the count matter, so the bootstrap draws those two columns."""
    logs = [[math.log(s.speedup) for s in group if s.passes(track, 0.0) and s.speedup > 0] for group in samples.values()]
    columns = np.array([[sum(values), len(values)] for values in logs], dtype=np.float64).reshape(-1, 2)
    value = _pooled(columns)
    if value is None:
        return {}
    # one task with a correct sample cannot say how much tasks differ
    several = int(np.count_nonzero(columns[:, 1])) > 1
    interval = bootstrap_interval(columns, _pooled, seed=seed, resamples=resamples, level=LEVEL) if several else None
    return _bounds(value, interval, "bootstrap") if interval else {"value": value}


def _pooled(columns: NDArray[np.float64]) -> float | None:
    total, count = columns.sum(axis=0)
    return math.exp(total / count) if count else None


def _bounds(value: float, interval: Interval, method: str) -> dict[str, Any]:
    return {"value": value, "lower": interval[0], "upper": interval[1], "interval": method}
