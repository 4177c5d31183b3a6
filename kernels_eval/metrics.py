"""The benchmark's statistics, in numpy alone: pass@k, fast_p, geometric-mean speedup and their intervals.

Guarantees: pure functions; the same arguments, seed included, give the same numbers. Shares are between 0 and 1. Does not guarantee
narrow intervals: resampling four tasks says how little four tasks say, and where it could say nothing there is no interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Interval(NamedTuple):
    """A confidence interval, both ends included."""

    lower: float
    upper: float


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right, where c of n were: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021 (arXiv 2107.03374), equation 1, as the product given there, which does not overflow. Raises ValueError unless
    0 <= c <= n and 1 <= k <= n: with fewer than k samples there is no unbiased estimate.
    """
    if not 0 <= c <= n:
        raise ValueError(f"c = {c} right of n = {n} samples")
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be estimated from n = {n} samples")
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def fast_p(speedups: Sequence[float], p: float) -> float:
    """Share of samples that are correct and faster than p times the reference; a speedup of 0 means not correct.

    KernelBench (arXiv 2502.10517), section 3.3. The comparison is strict, so fast_0 is the share correct. Raises ValueError where there
    are no speedups, where one is negative or not a number, and where p is negative.
    """
    values = _speedups(speedups)
    if not values.size:
        raise ValueError("the share of no samples is not defined")
    if not p >= 0:
        raise ValueError(f"p = {p} is not a speedup")
    return float(np.mean(values > p))


def geometric_mean(speedups: Sequence[float]) -> float | None:
    """Geometric mean of the speedups above 0, which are those of the correct samples; None where there are none.

    Raises ValueError where a speedup is negative or not a number.
    """
    values = _speedups(speedups)
    correct = values[values > 0]
    return float(np.exp(np.mean(np.log(correct)))) if correct.size else None


def mean(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Arithmetic mean: the statistic of a rate whose values are one per task. Raises ValueError where there are no values."""
    array = np.asarray(values, dtype=np.float64)
    if not array.size:
        raise ValueError("the mean of no values is not defined")
    return float(array.mean())


def bootstrap_interval(
    values_per_task: Sequence[Any] | NDArray[np.float64],
    statistic: Callable[[NDArray[np.float64]], float | None],
    *,
    seed: int = 0,
    resamples: int = 2000,
    level: float = 0.95,
) -> Interval | None:
    """Percentile bootstrap over tasks (Efron and Tibshirani 1993, chapter 13): whole tasks are drawn, with replacement.

    `values_per_task` has shape (tasks,) or (tasks, columns); `statistic` is given a resample of the same shape. Samples of a task share
    its difficulty, so the task is the unit (cluster bootstrap). Resamples where the statistic is None (no correct sample to average) are
    left out. None where the resamples do not differ or none is defined (one task, or all tasks alike): a point would claim a certainty
    that such data cannot give. Raises ValueError where there are no tasks, fewer than one resample, or a level outside (0, 1).
    """
    values = np.asarray(values_per_task, dtype=np.float64)
    if not len(values):
        raise ValueError("no tasks to resample")
    if resamples < 1:
        raise ValueError(f"resamples = {resamples} is below 1")
    tail = _tail(level)
    draws = np.random.default_rng(seed).integers(0, len(values), size=(resamples, len(values)))
    results = (statistic(values[draw]) for draw in draws)
    defined = [result for result in results if result is not None]
    if not defined or min(defined) == max(defined):
        return None
    lower, upper = np.quantile(defined, [tail, 1 - tail])
    return Interval(float(lower), float(upper))


def wilson_interval(successes: float, trials: int, level: float = 0.95) -> Interval:
    """Wilson's score interval of a share (Wilson 1927): has a width at 0 and 1 too, where the bootstrap's has none.

    For independent trials: samples of one task are not, so count tasks, or use `bootstrap_interval`. `successes` may be fractional (tasks
    times a mean rate). No trials: (0, 1), which says nothing. Raises ValueError unless 0 <= successes <= trials and 0 < level < 1.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials")
    tail = _tail(level)
    if trials == 0:
        return Interval(0.0, 1.0)
    z = NormalDist().inv_cdf(1 - tail)
    share = successes / trials
    centre = share + z**2 / (2 * trials)
    margin = z * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    scale = 1 + z**2 / trials
    # at no and at all successes the ends are exactly 0 and 1: rounding must not put the share outside its own interval
    lower = 0.0 if successes == 0 else (centre - margin) / scale
    upper = 1.0 if successes == trials else (centre + margin) / scale
    return Interval(lower, upper)


def _tail(level: float) -> float:
    if not 0 < level < 1:
        raise ValueError(f"level = {level} is not between 0 and 1")
    return (1 - level) / 2


def _speedups(speedups: Sequence[float]) -> NDArray[np.float64]:
    values = np.asarray(speedups, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"speedups have {values.ndim} dimensions, not one")
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise ValueError("a speedup is negative or not a finite number")
    return values
