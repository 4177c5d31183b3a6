"""Within one task, is the longer sample less often correct? What pooled data cannot say: hard tasks
are both longer and more often wrong.

Guarantees: only comparisons between samples of the same task enter, so anything that is a task's
own (difficulty, length of its prompt) cancels; three looks at it that share no assumption: a
conditional logistic regression, a linear model with a fixed effect a task (errors clustered by
task), and a permutation test that shuffles outcomes within each task. Does not guarantee a cause: a
sample may be long because it struggles.

statsmodels' conditional likelihood recurses in Python, about 0.9 ms a task of five samples: above
`max_conditional_tasks` it is fitted to a seeded random sample of tasks, which the estimate's
`tasks` shows. The other two always take every task.
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np

from tasks.analysis.config import ObservationConfig
from tasks.analysis.estimates import (
    LEVEL,
    MIN_GROUPS,
    SEPARATED,
    Codes,
    Floats,
    Mask,
    estimate,
    quiet,
    ratio,
    unknown,
)
from tasks.analysis.records import WithinTask
from tasks.reporting.findings import Estimate

MOST_DRAWS = 1000  # C(12, 6) is 924
BLOCK_NUMBERS = 2_000_000  # of possible sums held at once: 16 MB
# samples of a task that the recursion is given: its cost is quadratic, and its depth Python's
LONGEST_GROUP = 64


def within_task(
    task: Codes, tokens: Floats, correct: Mask, config: ObservationConfig
) -> WithinTask:
    """Return the analysis of samples sorted by task.

    Never raises for data that cannot say: its estimates then have a `why_not`.
    """
    codes = np.unique(task, return_inverse=True)[1]
    in_all = int(codes.max()) + 1 if len(codes) else 0
    mixed = _mixed(codes, correct, in_all)
    keep = mixed[codes] if in_all else np.zeros(0, dtype=bool)
    codes, x, y = np.unique(codes[keep], return_inverse=True)[1], tokens[keep], correct[keep]
    tasks, samples = int(mixed.sum()), len(x)
    why_not, sd = f"{tasks} of {in_all} tasks have both correct and incorrect samples", 0.0
    if tasks > 1:
        why_not, centred = "samples of one task are equally long", demeaned(x, codes, tasks)
        sd = math.sqrt(float(np.sum(centred**2)) / max(1, samples - tasks))
    none = unknown(why_not, samples, tasks)
    found = WithinTask(
        tasks=tasks,
        tasks_in_all=in_all,
        samples=samples,
        unit_tokens=config.unit_tokens,
        odds_ratio=none,
        odds_ratio_per_unit=none,
        slope=none,
    )
    if sd == 0:
        return found
    z = centred / sd
    per_sd, per_unit = _conditional(z, y, codes, tasks, config.unit_tokens / sd, config)
    shuffles = max(199, min(config.permutations, config.permutation_budget // samples))
    return found.model_copy(
        update={
            "sd_tokens": sd,
            "odds_ratio": per_sd,
            "odds_ratio_per_unit": per_unit,
            "slope": fixed_effects(z, demeaned(y.astype(np.float64), codes, tasks), codes, tasks),
            "permutation_p": permutation_p(z, y, codes, tasks, shuffles=shuffles, seed=config.seed),
            "permutations": shuffles,
        }
    )


def fixed_effects(x: Floats, y: Floats, codes: Codes, tasks: int) -> Estimate:
    """Slope of demeaned y on demeaned x: the linear model with a fixed effect a task, least
    squares, errors clustered by task."""
    from statsmodels.regression.linear_model import OLS

    if tasks < MIN_GROUPS or np.ptp(x) == 0:
        return unknown(
            f"{tasks} tasks are too few" if np.ptp(x) else "samples of one task are equally long",
            len(x),
            tasks,
        )
    with quiet():
        fit = OLS(y, x).fit(cov_type="cluster", cov_kwds={"groups": codes}, use_t=True)
        lower, upper = fit.conf_int(alpha=1 - LEVEL)[0]
    method = "fixed effects of tasks, clustered by task"
    if not math.isfinite(lower):
        return unknown("the linear model does not settle", len(x), tasks)
    return estimate(
        fit.params[0], (lower, upper), fit.pvalues[0], n=len(x), tasks=tasks, method=method
    )


def demeaned(values: Floats, codes: Codes, tasks: int) -> Floats:
    counts = np.bincount(codes, minlength=tasks)
    return values - (np.bincount(codes, weights=values, minlength=tasks) / counts)[codes]


def permutation_p(
    x: Floats, y: Mask, codes: Codes, tasks: int, *, shuffles: int, seed: int
) -> float:
    """Two-sided p of the sum of x over correct samples when outcomes are shuffled within tasks; x
    has mean 0 in every task.

    Never 0: the observed order is one of the orders.
    """
    order = np.argsort(codes, kind="stable")
    x, y = x[order], y[order]
    sizes, right = (
        np.bincount(codes, minlength=tasks),
        np.bincount(codes, weights=y, minlength=tasks).astype(np.int64),
    )
    starts = np.cumsum(sizes) - sizes
    random = np.random.default_rng(seed)
    sums = np.zeros(shuffles)
    for size, count in np.unique(np.stack([sizes, right], axis=1), axis=0):
        lengths = x[starts[(sizes == size) & (right == count)][:, None] + np.arange(size)]
        sums += _shuffled_sums(lengths, int(count), shuffles, random)
    observed = abs(float(x[y].sum()))
    return float(1 + np.count_nonzero(np.abs(sums) >= observed - 1e-9 * max(1.0, observed))) / (
        shuffles + 1
    )


def _shuffled_sums(
    lengths: Floats, count: int, shuffles: int, random: np.random.Generator
) -> Floats:
    """Per shuffle, the sum over tasks of `count` lengths drawn from each row (a task).

    Where a task has few possible draws, all are summed once and a shuffle picks one a task: some 15
    times faster than shuffling rows.
    """
    size, sums = lengths.shape[1], np.zeros(shuffles)
    draws = math.comb(size, count)
    if draws > MOST_DRAWS:
        for shuffle in range(shuffles):
            sums[shuffle] = random.permuted(lengths, axis=1)[:, :count].sum()
        return sums
    chosen = np.zeros((size, draws))
    for draw, members in enumerate(combinations(range(size), count)):
        chosen[list(members), draw] = 1.0
    for block in np.array_split(lengths, max(1, len(lengths) * draws // BLOCK_NUMBERS)):
        possible = (block @ chosen).ravel()
        first = np.arange(len(block)) * draws
        for shuffle in range(shuffles):
            sums[shuffle] += possible[first + random.integers(0, draws, size=len(block))].sum()
    return sums


def _mixed(codes: Codes, correct: Mask, tasks: int) -> Mask:
    counts, right = (
        np.bincount(codes, minlength=tasks),
        np.bincount(codes, weights=correct, minlength=tasks),
    )
    return (right > 0) & (right < counts)


def _conditional(
    z: Floats, y: Mask, codes: Codes, tasks: int, per_unit: float, config: ObservationConfig
) -> tuple[Estimate, Estimate]:
    """Odds ratios per standard deviation and per unit, by statsmodels' ConditionalLogit on at most
    `max_conditional_tasks` tasks."""
    from statsmodels.discrete.conditional_models import ConditionalLogit

    sizes = np.bincount(codes, minlength=tasks)
    fitting = np.flatnonzero(sizes <= LONGEST_GROUP)
    limit = config.max_conditional_tasks
    if len(fitting) > limit:
        fitting = np.random.default_rng(config.seed).choice(fitting, size=limit, replace=False)
    chosen = np.zeros(tasks, dtype=bool)
    chosen[fitting] = True
    keep = chosen[codes]
    n, used = int(keep.sum()), len(fitting)
    if used < 2:
        none = unknown(f"tasks have more than {LONGEST_GROUP} samples each", n, used)
        return none, none
    try:
        with quiet():
            fit = ConditionalLogit(
                y[keep].astype(np.float64), z[keep][:, None], groups=codes[keep]
            ).fit(disp=0)
            slope, error, p = float(fit.params[0]), float(fit.bse[0]), float(fit.pvalues[0])
    except (np.linalg.LinAlgError, ValueError, ArithmeticError):
        none = unknown(f"{SEPARATED}, within tasks", n, used)
        return none, none
    which = "a random sample" if used == limit else f"those of at most {LONGEST_GROUP} samples"
    sampled = f" on {which}, {used:,} of {tasks:,} tasks" if used < tasks else ""
    method = f"conditional logistic regression{sampled}"
    per_sd, other = (
        ratio(slope, error, p, factor, n=n, tasks=used, method=method) for factor in (1.0, per_unit)
    )
    return per_sd, other
