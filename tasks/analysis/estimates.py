"""Estimates with intervals that hold for clustered data: samples of one task share its difficulty,
so tasks are what is independent.

Guarantees: pure; the same arguments give the same numbers; an estimate that the data cannot support
has no value and says why; every interval names its method. The models are statsmodels' and scipy's;
only the grouping of tasks for the jackknife is ours. Does not guarantee an interval's coverage for
a handful of tasks: below `MIN_GROUPS` there is none.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.reporting.findings import Estimate

LEVEL = 0.95
MIN_GROUPS = 5
MAX_GROUPS = 50

SEPARATED = "length tells correct from incorrect perfectly, or nearly"

Floats = NDArray[np.float64]
Codes = NDArray[np.integer[Any]]
Mask = NDArray[np.bool_]


def unknown(why_not: str, n: int = 0, tasks: int = 0) -> Estimate:
    """Return an estimate without a value."""
    return Estimate(why_not=why_not, n=n, tasks=tasks)


def estimate(
    value: float,
    bounds: tuple[float, float] | None = None,
    p: float | None = None,
    *,
    n: int,
    tasks: int,
    method: str,
) -> Estimate:
    """Return an estimate as JSON can hold it: a number that is not finite becomes None."""
    lower, upper = bounds or (math.nan, math.nan)
    return Estimate(
        value=number(value),
        lower=number(lower),
        upper=number(upper),
        p=None if p is None else number(p),
        n=n,
        tasks=tasks,
        method=method,
    )


def number(value: float) -> float | None:
    """Return the value as JSON can hold it: None for what is not finite."""
    return float(value) if math.isfinite(value) else None


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share."""
    from statsmodels.stats.proportion import proportion_confint

    share = successes / trials
    lower, upper = proportion_confint(successes, trials, alpha=1 - LEVEL, method="wilson")
    # rounding must not put a share of 0 or 1 outside its own interval
    return max(0.0, min(float(lower), share)), min(1.0, max(float(upper), share))


@contextmanager
def quiet() -> Iterator[None]:
    """statsmodels and scipy warn of data that cannot be fitted; such a fit is recognised by its
    numbers and becomes an unknown."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


def jackknife(
    statistic: Callable[[Mask], float],
    task: Codes,
    *,
    seed: int,
    forward: Callable[[float], float] = float,
    back: Callable[[float], float] = float,
) -> tuple[float, float] | None:
    """95 % interval of `statistic` by the delete-a-group jackknife over tasks (Kott 2001): up to 50
    random groups of whole tasks.

    `statistic` is given a mask of the samples that stay. `forward` takes it to a scale on which it
    is nearer to normal, `back` returns. None below `MIN_GROUPS` tasks, and where the statistic is
    undefined or does not vary.
    """
    from scipy.stats import t

    codes = np.unique(task, return_inverse=True)[1]
    tasks = int(codes.max()) + 1 if len(codes) else 0
    groups = min(tasks, MAX_GROUPS)
    if groups < MIN_GROUPS:
        return None
    group = (np.random.default_rng(seed).permutation(tasks) % groups)[codes]
    with quiet():
        centre = forward(statistic(np.ones(len(task), dtype=bool)))
        left = np.array([forward(statistic(group != g)) for g in range(groups)])
    error = math.sqrt((groups - 1) / groups * float(np.sum((left - left.mean()) ** 2)))
    if not math.isfinite(centre) or not math.isfinite(error) or error == 0:
        return None
    reach = float(t.ppf(0.5 + LEVEL / 2, groups - 1)) * error
    return back(centre - reach), back(centre + reach)


def correlation(x: Floats, y: Floats, task: Codes, *, ranks: bool, seed: int) -> Estimate:
    """Pearson's r, or Spearman's rho with `ranks`; the interval is a jackknife over tasks on
    Fisher's z, p is scipy's."""
    from scipy.stats import pearsonr, rankdata, spearmanr

    tasks = len(np.unique(task))
    if len(x) < 4:
        return unknown(f"{len(x)} samples are too few", len(x), tasks)
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return unknown("one of the two does not vary", len(x), tasks)

    def statistic(keep: Mask) -> float:
        a, b = (x[keep], y[keep]) if not ranks else (rankdata(x[keep]), rankdata(y[keep]))
        return float(np.corrcoef(a, b)[0, 1])

    with quiet():
        found = spearmanr(x, y) if ranks else pearsonr(x, y)
    bounds = jackknife(statistic, task, seed=seed, forward=_fisher, back=math.tanh)
    method = f"{'Spearman' if ranks else 'Pearson'}, jackknife over tasks"
    return estimate(found.statistic, bounds, found.pvalue, n=len(x), tasks=tasks, method=method)


def longer_if_incorrect(tokens: Floats, correct: Mask, task: Codes, *, seed: int) -> Estimate:
    """Chance that a random incorrect sample is longer than a random correct one (ties count half):
    Mann-Whitney's U over its maximum."""
    from scipy.stats import mannwhitneyu

    tasks = len(np.unique(task))
    if correct.all() or not correct.any():
        return unknown(
            f"all samples are {'correct' if correct.any() else 'incorrect'}", len(tokens), tasks
        )

    order = np.argsort(tokens, kind="stable")
    tokens, correct, task = tokens[order], correct[order], task[order]

    def statistic(keep: Mask) -> float:
        ours, theirs = tokens[keep & ~correct], tokens[keep & correct]  # both sorted
        below = np.searchsorted(theirs, ours, "left") + np.searchsorted(theirs, ours, "right")
        return (
            float(below.sum()) / 2 / (len(ours) * len(theirs))
            if len(ours) and len(theirs)
            else math.nan
        )

    with quiet():
        found = mannwhitneyu(tokens[~correct], tokens[correct], method="asymptotic")
    value = float(found.statistic) / (int((~correct).sum()) * int(correct.sum()))
    if bounds := jackknife(statistic, task, seed=seed):
        bounds = max(0.0, bounds[0]), min(1.0, bounds[1])
    method = "Mann-Whitney U, jackknife over tasks"
    return estimate(value, bounds, found.pvalue, n=len(tokens), tasks=tasks, method=method)


def pooled_odds_ratio(tokens: Floats, correct: Mask, task: Codes, per_tokens: float) -> Estimate:
    """Odds ratio of being correct for `per_tokens` more, tasks ignored: logistic regression, errors
    clustered by task."""
    from statsmodels.discrete.discrete_model import Logit
    from statsmodels.tools.sm_exceptions import PerfectSeparationError

    tasks = len(np.unique(task))
    if correct.all() or not correct.any() or np.ptp(tokens) == 0:
        return unknown("the outcome or the length does not vary", len(tokens), tasks)
    if tasks < MIN_GROUPS:
        return unknown(f"{tasks} tasks are too few", len(tokens), tasks)
    scale = float(tokens.std())
    design = np.column_stack([np.ones(len(tokens)), (tokens - tokens.mean()) / scale])
    try:
        with quiet():
            fit = Logit(correct.astype(np.float64), design).fit(
                disp=0, cov_type="cluster", cov_kwds={"groups": task}
            )
            slope, error, p = float(fit.params[1]), float(fit.bse[1]), float(fit.pvalues[1])
    except (np.linalg.LinAlgError, ValueError, PerfectSeparationError):
        return unknown(SEPARATED, len(tokens), tasks)
    return ratio(
        slope,
        error,
        p,
        per_tokens / scale,
        n=len(tokens),
        tasks=tasks,
        method="logistic regression, clustered by task",
    )


def ratio(
    slope: float, error: float, p: float, factor: float, *, n: int, tasks: int, method: str
) -> Estimate:
    """exp of a log odds ratio and its Wald interval, rescaled; unknown where the fit did not
    settle."""
    from scipy.stats import norm

    if (
        not (math.isfinite(slope) and math.isfinite(error))
        or error <= 0
        or abs(slope) > 20
        or error > 20
    ):
        return unknown(SEPARATED, n, tasks)
    reach = float(norm.ppf(0.5 + LEVEL / 2)) * error
    value, lower, upper = (
        math.exp(min(700.0, x * factor)) for x in (slope, slope - reach, slope + reach)
    )
    return estimate(value, (lower, upper), p, n=n, tasks=tasks, method=method)


def mean_of(values: Floats, tasks: int, method: str) -> Estimate:
    """Mean of one value a task with Student's interval; no bounds for one value, or where all are
    alike."""
    from statsmodels.stats.weightstats import DescrStatsW

    if not len(values):
        return unknown("no value to average")
    bounds = None
    if len(values) > 1 and np.ptp(values):
        bounds = DescrStatsW(values).tconfint_mean(alpha=1 - LEVEL)
    return estimate(values.mean(), bounds, n=len(values), tasks=tasks, method=method)


def _fisher(r: float) -> float:
    return math.atanh(max(-1 + 1e-12, min(1 - 1e-12, r))) if math.isfinite(r) else math.nan
