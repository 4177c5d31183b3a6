"""Statistics with intervals for clustered data: tasks, not samples, are independent. What the data
cannot support has no value and a reason."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.reporting.findings import Estimate

Z = 1.959963984540054
"""Standard errors on either side that hold 95 % of a normal distribution."""
MIN_GROUPS, MAX_GROUPS = 5, 50
"""Number of jackknife groups of tasks."""
STEEPEST = 20.0
"""Larger log odds ratios mean that the fit has no finite answer."""
MOST_STEPS = 100

Floats = NDArray[np.float64]
Codes = NDArray[np.integer[Any]]
Mask = NDArray[np.bool_]


# -- odds within tasks -----------------------------------------------------------------------------


def odds_ratio(exposure: Floats, correct: Mask, task: Codes) -> Estimate:
    """Odds ratio of being correct per unit of exposure, among samples of one task.

    Conditional logistic regression (Breslow and Day 1980, chapter 7): the exact likelihood given
    each task's number of correct samples. Samples are sorted by task. The interval is Wald's.
    """
    codes = np.unique(task, return_inverse=True)[1]
    sizes = np.bincount(codes)
    right = np.bincount(codes, weights=correct).astype(np.int64)
    mixed = (right > 0) & (right < sizes)
    estimate = Estimate(
        n=int(sizes[mixed].sum()), tasks=int(mixed.sum()), method="conditional logistic regression"
    )
    if estimate.tasks < 2:
        both = "tasks with both correct and incorrect samples"
        return estimate.unknown(f"{both}: {estimate.tasks}, and it takes 2")
    observed = float(exposure[correct & mixed[codes]].sum())
    tables = list(_tables(exposure, sizes, right))
    if not any(np.ptp(values) for values, _ in tables):
        return estimate.unknown("samples of one task are equally long")
    fit = _fitted(tables, observed)
    if fit is None:
        return estimate.unknown("length tells correct from incorrect perfectly, or nearly")
    slope, error = fit
    return estimate.found(*(math.exp(slope + shift * error) for shift in (0, -Z, Z)))


def _tables(exposure: Floats, sizes: Codes, right: Codes) -> Iterator[tuple[Floats, int]]:
    starts = np.cumsum(sizes) - sizes
    for size, count in np.unique(np.stack([sizes, right], axis=1), axis=0):
        if 0 < count < size:
            first = starts[(sizes == size) & (right == count)]
            yield exposure[first[:, None] + np.arange(size)], int(count)


def _fitted(tables: list[tuple[Floats, int]], observed: float) -> tuple[float, float] | None:
    slope = 0.0
    for _ in range(MOST_STEPS):
        moments = [_moments(slope, *table) for table in tables]
        expected, information = np.sum(moments, axis=0)
        if not information > 0:
            return None
        step = (observed - expected) / information
        slope += float(np.clip(step, -1.0, 1.0))
        if abs(slope) > STEEPEST:
            return None
        if abs(step) < 1e-10:
            return slope, float(1 / math.sqrt(information))
    return None


def _moments(slope: float, exposure: Floats, count: int) -> tuple[float, float]:
    """Mean and variance of correct samples' exposure sums (Gail, Lubin and Rubinstein 1981)."""
    weights = np.exp(slope * exposure)
    total = np.zeros((3, count + 1, len(exposure)))
    total[0, 0] = 1.0
    for value, weight in zip(exposure.T, weights.T, strict=True):
        none, first, second = total[:, :-1].copy()
        total[0, 1:] += weight * none
        total[1, 1:] += weight * (first + value * none)
        total[2, 1:] += weight * (second + 2 * value * first + value**2 * none)
        total /= total[0].max(axis=0)
    mean = total[1, count] / total[0, count]
    variance = total[2, count] / total[0, count] - mean**2
    return float(mean.sum()), float(variance.sum())


# -- rank correlation ------------------------------------------------------------------------------


def rank_correlation(x: Floats, y: Floats, task: Codes) -> Estimate:
    """Return Spearman's rho with a delete-a-group jackknife interval over tasks (Kott 2001) on
    Fisher's scale: up to `MAX_GROUPS` random groups of whole tasks."""
    from scipy.stats import spearmanr, t

    names, codes = np.unique(task, return_inverse=True)
    groups = min(len(names), MAX_GROUPS)
    estimate = Estimate(n=len(x), tasks=len(names), method="Spearman, jackknife over tasks")
    if len(x) < 4:
        return estimate.unknown(f"{len(x)} correct samples have a speedup")
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return estimate.unknown("length or speedup does not vary")
    if groups < MIN_GROUPS:
        return estimate.unknown(f"tasks with a timed sample: {groups}, and it takes {MIN_GROUPS}")
    value = float(spearmanr(x, y).statistic)
    group = (np.random.default_rng(0).permutation(len(names)) % groups)[codes]
    kept = [group != number for number in range(groups)]
    with np.errstate(invalid="ignore"), warnings.catch_warnings(action="ignore"):
        rhos = [spearmanr(x[each], y[each]).statistic for each in kept]
    left = np.array([_fisher(float(rho)) for rho in rhos])
    error = math.sqrt((groups - 1) / groups * float(np.sum((left - left.mean()) ** 2)))
    if not math.isfinite(error) or error == 0:
        return estimate.found(value)
    centre, reach = _fisher(value), float(t.ppf(0.975, groups - 1)) * error
    return estimate.found(value, math.tanh(centre - reach), math.tanh(centre + reach))


def _fisher(rho: float) -> float:
    return math.atanh(max(-1 + 1e-12, min(1 - 1e-12, rho))) if math.isfinite(rho) else math.nan
