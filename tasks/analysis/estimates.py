"""Estimates with intervals that hold for clustered data: samples of one task share its difficulty,
so tasks are what is independent.

Guarantees: pure; the same arguments give the same numbers; an estimate that the data cannot support
has no value and says why; every interval names its method. The models are statsmodels' and scipy's;
only the grouping of tasks for the jackknife is implemented here. Does not guarantee an interval's
coverage for a handful of tasks: below `MIN_GROUPS` there is none.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

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


class Basis(NamedTuple):
    """What an estimate rests on: `n` samples of `tasks` tasks."""

    n: int = 0
    tasks: int = 0

    def unknown(self, reason: str) -> Estimate:
        """Return an estimate without a value."""
        return Estimate(why_not=reason, n=self.n, tasks=self.tasks)

    def estimate(
        self,
        value: float,
        bounds: Sequence[float] | None,
        method: str,
        p: float | None = None,
    ) -> Estimate:
        """Return an estimate as JSON can hold it: a number that is not finite becomes None."""
        lower, upper = (math.nan, math.nan) if bounds is None else bounds
        return Estimate(
            value=number(value),
            lower=number(lower),
            upper=number(upper),
            p=None if p is None else number(p),
            n=self.n,
            tasks=self.tasks,
            method=method,
        )

    def odds_ratios(
        self, fit: Callable[[], Any], factors: Sequence[float], method: str
    ) -> list[Estimate]:
        """exp of a model's last log odds ratio and its Wald interval, rescaled by each factor;
        unknown where the fit did not settle."""
        from scipy.stats import norm
        from statsmodels.tools.sm_exceptions import PerfectSeparationError

        try:
            with quiet():
                found = fit()
                slope, error, p = (
                    float(each[-1]) for each in (found.params, found.bse, found.pvalues)
                )
        except (np.linalg.LinAlgError, ValueError, ArithmeticError, PerfectSeparationError):
            slope = error = p = math.nan
        # a comparison with a number that is not finite is false
        if not (abs(slope) <= 20 and 0 < error <= 20):
            return [self.unknown(SEPARATED)] * len(factors)
        reach = float(norm.ppf(0.5 + LEVEL / 2)) * error
        found = []
        for factor in factors:
            value, *bounds = (
                math.exp(min(700.0, x * factor)) for x in (slope, slope - reach, slope + reach)
            )
            found.append(self.estimate(value, bounds, method, p))
        return found


def mantel_haenszel(high: Codes, y: Mask, codes: Codes, basis: Basis) -> Estimate:
    """Odds ratio of `y` between samples with `high` 1 and those with -1 (0 has no say), tables of
    tasks pooled by Mantel and Haenszel (1959) with the variance of Robins, Breslow and Greenland
    (1986); p is the Cochran-Mantel-Haenszel test's.

    Where all informative tables point the same way that ratio is 0 or infinite: 0.5 is then added
    to tables with an empty cell, which draws it towards 1.
    """
    from statsmodels.stats.contingency_tables import StratifiedTable

    tables = np.zeros((2, 2, basis.tasks))
    told = high != 0
    np.add.at(tables, ((high < 0)[told].astype(int), (~y[told]).astype(int), codes[told]), 1.0)
    tables = tables[:, :, (tables.any(axis=0) & tables.any(axis=1)).all(axis=0)]
    if not tables.size:
        return basis.unknown("no task has both outcomes and lengths on both sides of its median")

    def fit(shift: bool) -> object:
        found = StratifiedTable(tables, shift_zeros=shift)
        p = found.test_null_odds().pvalue
        return SimpleNamespace(
            params=[found.logodds_pooled], bse=[found.logodds_pooled_se], pvalues=[p]
        )

    named = "Mantel-Haenszel, Robins-Breslow-Greenland"
    used = Basis(int(tables.sum()), tables.shape[2])
    (found,) = used.odds_ratios(lambda: fit(False), [1.0], named)
    if found.value is None:
        (found,) = used.odds_ratios(lambda: fit(True), [1.0], f"{named}, 0.5 added")
    return found


def basis_of(task: Codes) -> Basis:
    """Return the samples and tasks of an array with the task of each sample."""
    return Basis(len(task), len(np.unique(task)))


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

    names, codes = np.unique(task, return_inverse=True)
    groups = min(len(names), MAX_GROUPS)
    if groups < MIN_GROUPS:
        return None
    group = (np.random.default_rng(seed).permutation(len(names)) % groups)[codes]
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

    basis = basis_of(task)
    if len(x) < 4:
        return basis.unknown(f"{len(x)} samples are too few")
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return basis.unknown("one of the two does not vary")

    def statistic(keep: Mask) -> float:
        a, b = (x[keep], y[keep]) if not ranks else (rankdata(x[keep]), rankdata(y[keep]))
        return float(np.corrcoef(a, b)[0, 1])

    with quiet():
        found = spearmanr(x, y) if ranks else pearsonr(x, y)
    bounds = jackknife(statistic, task, seed=seed, forward=_fisher, back=math.tanh)
    method = f"{'Spearman' if ranks else 'Pearson'}, jackknife over tasks"
    return basis.estimate(found.statistic, bounds, method, found.pvalue)


def longer_if_incorrect(tokens: Floats, correct: Mask, task: Codes, *, seed: int) -> Estimate:
    """Chance that a random incorrect sample is longer than a random correct one (ties count half):
    Mann-Whitney's U over its maximum."""
    from scipy.stats import mannwhitneyu

    basis = basis_of(task)
    if correct.all() or not correct.any():
        return basis.unknown(f"all samples are {'correct' if correct.any() else 'incorrect'}")
    order = np.argsort(tokens, kind="stable")
    tokens, correct, task = tokens[order], correct[order], task[order]

    def statistic(keep: Mask) -> float:
        wrong, right = tokens[keep & ~correct], tokens[keep & correct]  # both sorted
        below = np.searchsorted(right, wrong, "left") + np.searchsorted(right, wrong, "right")
        pairs = len(wrong) * len(right)
        return float(below.sum()) / 2 / pairs if pairs else math.nan

    with quiet():
        found = mannwhitneyu(tokens[~correct], tokens[correct], method="asymptotic")
    value = float(found.statistic) / (int((~correct).sum()) * int(correct.sum()))
    if bounds := jackknife(statistic, task, seed=seed):
        bounds = max(0.0, bounds[0]), min(1.0, bounds[1])
    return basis.estimate(value, bounds, "Mann-Whitney U, jackknife over tasks", found.pvalue)


def pooled_odds_ratio(tokens: Floats, correct: Mask, task: Codes, per_tokens: float) -> Estimate:
    """Odds ratio of being correct for `per_tokens` more, tasks ignored: logistic regression, errors
    clustered by task."""
    from statsmodels.discrete.discrete_model import Logit

    basis = basis_of(task)
    if correct.all() or not correct.any() or np.ptp(tokens) == 0:
        return basis.unknown("the outcome or the length does not vary")
    if basis.tasks < MIN_GROUPS:
        return basis.unknown(f"{basis.tasks} tasks are too few")
    scale = float(tokens.std())
    design = np.column_stack([np.ones(len(tokens)), (tokens - tokens.mean()) / scale])

    def fit() -> Any:
        model = Logit(correct.astype(np.float64), design)
        return model.fit(disp=0, cov_type="cluster", cov_kwds={"groups": task})

    method = "logistic regression, clustered by task"
    return basis.odds_ratios(fit, [per_tokens / scale], method)[0]


def _fisher(r: float) -> float:
    return math.atanh(max(-1 + 1e-12, min(1 - 1e-12, r))) if math.isfinite(r) else math.nan
