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

import numpy as np
from numpy.typing import NDArray

from kernels_eval.records import Record

LEVEL = 0.95
MIN_GROUPS = 5
MAX_GROUPS = 50

Floats = NDArray[np.float64]


class Estimate(Record):
    """One figure. `lower` and `upper` bound it with 95 % confidence by `method`; `p` tests no
    effect, two-sided.

    `n` samples of `tasks` tasks went in. Where `value` is None, `why_not` says why; where only the
    bounds are, the tasks were too few.
    """

    value: float | None = None
    lower: float | None = None
    upper: float | None = None
    p: float | None = None
    n: int = 0
    tasks: int = 0
    method: str = ""
    why_not: str = ""

    @property
    def bounded(self) -> bool:
        return self.lower is not None and self.upper is not None


def unknown(why_not: str, n: int = 0, tasks: int = 0) -> Estimate:
    return Estimate(why_not=why_not, n=n, tasks=tasks)


def number(value: float) -> float | None:
    """The value as JSON can hold it: None for what is not finite."""
    return float(value) if math.isfinite(value) else None


@contextmanager
def quiet() -> Iterator[None]:
    """statsmodels and scipy warn of data that cannot be fitted; such a fit is recognised by its
    numbers and becomes an unknown."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


def jackknife(
    statistic: Callable[[NDArray[np.bool_]], float],
    task: NDArray[np.integer],
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


def correlation(
    x: Floats, y: Floats, task: NDArray[np.integer], *, ranks: bool, seed: int
) -> Estimate:
    """Pearson's r, or Spearman's rho with `ranks`; the interval is a jackknife over tasks on
    Fisher's z, p is scipy's."""
    from scipy.stats import pearsonr, rankdata, spearmanr

    tasks = len(np.unique(task))
    if len(x) < 4:
        return unknown(f"{len(x)} samples are too few", len(x), tasks)
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return unknown("one of the two does not vary", len(x), tasks)

    def statistic(keep: NDArray[np.bool_]) -> float:
        a, b = (x[keep], y[keep]) if not ranks else (rankdata(x[keep]), rankdata(y[keep]))
        return float(np.corrcoef(a, b)[0, 1])

    with quiet():
        found = spearmanr(x, y) if ranks else pearsonr(x, y)
    bounds = jackknife(statistic, task, seed=seed, forward=_fisher, back=math.tanh) or (None, None)
    name = "Spearman" if ranks else "Pearson"
    method = f"{name}, jackknife over tasks"
    value, p = number(found.statistic), number(found.pvalue)
    return Estimate(
        value=value, lower=bounds[0], upper=bounds[1], p=p, n=len(x), tasks=tasks, method=method
    )


def longer_if_incorrect(
    tokens: Floats, correct: NDArray[np.bool_], task: NDArray[np.integer], *, seed: int
) -> Estimate:
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

    def statistic(keep: NDArray[np.bool_]) -> float:
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
    bounds = jackknife(statistic, task, seed=seed)
    lower, upper = (max(0.0, bounds[0]), min(1.0, bounds[1])) if bounds else (None, None)
    method = "Mann-Whitney U, jackknife over tasks"
    return Estimate(
        value=value,
        lower=lower,
        upper=upper,
        p=number(found.pvalue),
        n=len(tokens),
        tasks=tasks,
        method=method,
    )


def pooled_odds_ratio(
    tokens: Floats, correct: NDArray[np.bool_], task: NDArray[np.integer], per_tokens: float
) -> Estimate:
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
        return unknown(
            "length tells correct from incorrect perfectly, or nearly", len(tokens), tasks
        )
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
        return unknown("length tells correct from incorrect perfectly, or nearly", n, tasks)
    reach = float(norm.ppf(0.5 + LEVEL / 2)) * error
    value, lower, upper = (
        math.exp(min(700.0, x * factor)) for x in (slope, slope - reach, slope + reach)
    )
    return Estimate(
        value=value, lower=lower, upper=upper, p=number(p), n=n, tasks=tasks, method=method
    )


def mean_of(values: Floats, tasks: int, method: str) -> Estimate:
    """Mean of one value a task with Student's interval; no bounds for one value, or where all are
    alike."""
    from statsmodels.stats.weightstats import DescrStatsW

    if not len(values):
        return unknown("no value to average")
    if len(values) < 2 or np.ptp(values) == 0:
        return Estimate(value=float(values.mean()), n=len(values), tasks=tasks, method=method)
    lower, upper = DescrStatsW(values).tconfint_mean(alpha=1 - LEVEL)
    return Estimate(
        value=float(values.mean()),
        lower=number(lower),
        upper=number(upper),
        n=len(values),
        tasks=tasks,
        method=method,
    )


def _fisher(r: float) -> float:
    return math.atanh(max(-1 + 1e-12, min(1 - 1e-12, r))) if math.isfinite(r) else math.nan
