"""Within one task, is the longer sample less often correct? What pooled data cannot say: hard tasks
are both longer and more often wrong.

Guarantees: only comparisons between samples of the same task enter, so anything that is a task's
own (difficulty, level, token limit, length of its prompt) cancels. Three statistics that may
disagree: linear in tokens, in ranks within the task (what curation selects by), and above against
below the task's median length. The linear one is computed in three ways (conditional logistic
regression, a linear model with a fixed effect per task, a permutation test): they rest on the same
sum of lengths over correct samples and are one piece of evidence, not three. Does not guarantee a
cause: a sample may be long because it struggles.

statsmodels' conditional likelihood recurses in Python, about 0.9 ms per task of five samples: above
`max_conditional_tasks` it is fitted to a seeded random sample of tasks, which the estimate's
`tasks` shows. The others always take every task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import polars as pl

from tasks.analysis.config import ObservationConfig
from tasks.analysis.estimates import (
    LEVEL,
    MIN_GROUPS,
    Basis,
    Codes,
    Floats,
    Mask,
    mantel_haenszel,
    quiet,
)
from tasks.analysis.records import WithinTask
from tasks.reporting.findings import Estimate

MOST_DRAWS = 1000  # C(12, 6) is 924
BLOCK_NUMBERS = 2_000_000  # of possible sums held at once: 16 MB
# samples of a task that the recursion is given: its cost is quadratic, and its depth Python's
LONGEST_GROUP = 64
ESTIMATES = tuple(
    name for name, field in WithinTask.model_fields.items() if field.annotation is Estimate
)


def within_task(
    task: Codes, tokens: Floats, correct: Mask, config: ObservationConfig, *, permute: bool = True
) -> WithinTask:
    """Return the analysis of samples sorted by task; without `permute`, no permutation test.

    Never raises for data that cannot say: its estimates then have a `why_not`.
    """
    names, place, counts = np.unique(task, return_inverse=True, return_counts=True)
    right = np.bincount(place, weights=correct, minlength=len(names))
    keep = ((right > 0) & (right < counts))[place]
    y = correct[keep]
    codes, z, sd, basis = standardised(task[keep], tokens[keep])
    facts: dict[str, Any] = {
        "tasks": basis.tasks,
        "tasks_in_all": len(names),
        "samples": basis.n,
        "unit_tokens": config.unit_tokens,
    }
    if sd is None:
        reason = f"{basis.tasks} of {len(names)} tasks have both correct and incorrect samples"
        if basis.tasks > 1:
            reason = "samples of one task are equally long"
        return WithinTask(**facts, **dict.fromkeys(ESTIMATES, basis.unknown(reason)))
    ranks, side = ranks_and_sides(codes, tokens[keep])
    _, ranks, rank_sd, _ = standardised(codes, ranks)
    per_sd, per_unit = _conditional(z, y, codes, [1.0, config.unit_tokens / sd], config)
    (per_rank,) = _conditional(ranks, y, codes, [1.0], config)
    if permute:
        shuffles = max(199, min(config.permutations, config.permutation_budget // basis.n))
        p = permutation_p(z, y, codes, basis.tasks, shuffles=shuffles, seed=config.seed)
        facts |= {"permutation_p": p, "permutations": shuffles}
    return WithinTask(
        **facts,
        sd_tokens=sd,
        sd_rank=rank_sd,
        odds_ratio=per_sd,
        odds_ratio_per_unit=per_unit,
        slope=fixed_effects(z, y.astype(np.float64), codes),
        rank_odds_ratio=per_rank,
        rank_slope=fixed_effects(ranks, y.astype(np.float64), codes),
        median_odds_ratio=mantel_haenszel(side, y, codes, basis),
    )


def ranks_and_sides(codes: Codes, values: Floats) -> tuple[Floats, Codes]:
    """Of each sample: its rank among its task's values as a share of them (ties: the mean rank),
    and 1 above, -1 below, 0 at their median."""
    value = pl.col("value")
    found = pl.DataFrame({"task": codes, "value": values}).select(
        rank=(value.rank("average") / pl.len()).over("task"),
        side=(value - value.median()).sign().over("task").cast(pl.Int8),
    )
    return found["rank"].to_numpy(), found["side"].to_numpy()


def standardised(task: Codes, tokens: Floats) -> tuple[Codes, Floats, float | None, Basis]:
    """Number of each sample's task, its length less its task's mean in standard deviations within
    a task, and that deviation: None for fewer than two tasks, and where lengths do not vary."""
    names, codes = np.unique(task, return_inverse=True)
    basis = Basis(len(codes), len(names))
    if basis.tasks < 2:
        return codes, tokens, None, basis
    centred = demeaned(tokens, codes, basis.tasks)
    sd = math.sqrt(float(np.sum(centred**2)) / max(1, basis.n - basis.tasks))
    return codes, centred / (sd or 1.0), sd or None, basis


def fixed_effects(x: Floats, y: Floats, codes: Codes) -> Estimate:
    """Slope of y on x, which has mean 0 in every task: the linear model with one fixed effect per
    task, least squares, errors clustered by task."""
    from statsmodels.regression.linear_model import OLS

    basis = Basis(len(x), int(codes.max()) + 1)
    if basis.tasks < MIN_GROUPS:
        return basis.unknown(f"{basis.tasks} tasks are too few")
    with quiet():
        model = OLS(demeaned(y, codes, basis.tasks), x)
        fit = model.fit(cov_type="cluster", cov_kwds={"groups": codes}, use_t=True)
        bounds = fit.conf_int(alpha=1 - LEVEL)[0]
    if not math.isfinite(bounds[0]):
        return basis.unknown("the linear model does not settle")
    method = "fixed effects of tasks, clustered by task"
    return basis.estimate(fit.params[0], bounds, method, fit.pvalues[0])


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
    sizes = np.bincount(codes, minlength=tasks)
    right = np.bincount(codes, weights=y, minlength=tasks).astype(np.int64)
    starts = np.cumsum(sizes) - sizes
    random = np.random.default_rng(seed)
    sums = np.zeros(shuffles)
    for size, count in np.unique(np.stack([sizes, right], axis=1), axis=0):
        lengths = x[starts[(sizes == size) & (right == count)][:, None] + np.arange(size)]
        sums += _shuffled_sums(lengths, int(count), shuffles, random)
    observed = abs(float(x[y].sum()))
    extreme = np.count_nonzero(np.abs(sums) >= observed - 1e-9 * max(1.0, observed))
    return float(1 + extreme) / (shuffles + 1)


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


def _conditional(
    z: Floats, y: Mask, codes: Codes, factors: Sequence[float], config: ObservationConfig
) -> list[Estimate]:
    """Odds ratios per so many of z, by statsmodels' ConditionalLogit on at most
    `max_conditional_tasks` tasks."""
    from statsmodels.discrete.conditional_models import ConditionalLogit

    sizes = np.bincount(codes)
    fitting = np.flatnonzero(sizes <= LONGEST_GROUP)
    limit = config.max_conditional_tasks
    if len(fitting) > limit:
        fitting = np.random.default_rng(config.seed).choice(fitting, size=limit, replace=False)
    keep = np.isin(codes, fitting)
    tasks, used = len(sizes), len(fitting)
    basis = Basis(int(keep.sum()), used)
    if used < 2:
        return [basis.unknown(f"tasks have more than {LONGEST_GROUP} samples each")] * len(factors)

    def fit() -> object:
        outcome = y[keep].astype(np.float64)
        return ConditionalLogit(outcome, z[keep][:, None], groups=codes[keep]).fit(disp=0)

    which = "a random sample" if used == limit else f"those of at most {LONGEST_GROUP} samples"
    sampled = f" on {which}, {used:,} of {tasks:,} tasks" if used < tasks else ""
    return basis.odds_ratios(fit, factors, f"conditional logistic regression{sampled}")
