"""Paired comparison of models: differences with intervals, a permutation test, and Holm's
correction.

Guarantees: only tasks and metrics that both models support count. One training run each shows no
spread between seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import polars as pl

from kernels_eval.errors import UsageError
from tasks.scores import (
    RESAMPLES,
    TRACKS,
    Floats,
    percentile_interval,
    resampled_means,
    scorable,
    task_rates,
)

EXACT_DIFFERENCES = 14
"""Up to so many differences every pattern of signs is tried: 16,384 sums take a millisecond."""
PERMUTATIONS = 9999
_ROUNDING = 1e-12
_SCHEMA = {
    **dict.fromkeys(("model", "baseline", "track", "metric"), pl.String),
    **dict.fromkeys(("k", "tasks"), pl.Int64),
    **dict.fromkeys(("difference", "lower", "upper", "p"), pl.Float64),
}


def paired_differences(
    frame: pl.DataFrame,
    *,
    pairs: Sequence[tuple[str, str]] | None = None,
    ks: Sequence[int] = (1,),
    ps: Sequence[float] = (1.0,),
    resamples: int = RESAMPLES,
) -> pl.DataFrame:
    """Exec and fast_p of models minus their baselines, over shared tasks and on both tracks: model,
    baseline, track, metric, k, tasks, difference, lower, upper, p, p_holm.

    `frame` is that of `tasks.scores.scores`; `pairs` are (baseline, model), by default the first
    model against all others. Intervals bootstrap pairs of tasks, null where all differ equally;
    `p_holm` is corrected (Holm 1979) over a track's rows. Raises UsageError as `scores` does, and
    for a missing model.
    """
    models = frame["model"].unique(maintain_order=True).to_list()
    chosen = list(itertools.combinations(models, 2)) if pairs is None else pairs
    if unknown := sorted({name for pair in chosen for name in pair} - set(models)):
        raise UsageError(
            f"no verdicts of model {unknown[0]!r}",
            f"models in this frame: {', '.join(models) or 'none'}",
        )
    samples = scorable(frame, ["model"])
    rates = {
        track: task_rates(samples, by=["model"], ks=ks, ps=ps, track=track).partition_by(
            "model", as_dict=True
        )
        for track in TRACKS
    }
    rows = []
    for (baseline, model), track in itertools.product(chosen, TRACKS):
        known = rates[track]
        if (baseline,) not in known or (model,) not in known:
            continue
        shared = known[model,].join(
            known[baseline,], on=["task_id", "metric", "k"], maintain_order="left", suffix="_before"
        )
        for (metric, k), tasks in shared.group_by("metric", "k", maintain_order=True):
            differences = (tasks["rate"] - tasks["rate_before"]).to_numpy()
            if not np.isnan(differences).any():
                found = _difference(differences, resamples)
                rows.append((model, baseline, track, metric, k, len(differences), *found))
    return corrected(pl.DataFrame(rows, _SCHEMA, orient="row"), "p", "track")


def corrected(rows: pl.DataFrame, column: str, *by: str) -> pl.DataFrame:
    """Add `COLUMN_holm`: p values corrected within each group (Holm 1979). Nulls stay and do not
    count."""
    from statsmodels.stats.multitest import multipletests

    name = f"{column}_holm"
    rows = rows.with_columns(pl.lit(None, pl.Float64).alias(name)).with_row_index("_row")
    for _, group in rows.drop_nulls(column).group_by(*by):
        values = multipletests(group[column].to_numpy(), method="holm")[1]
        known = group.select("_row").with_columns(pl.Series(name, values))
        rows = rows.update(known, on="_row")
    return rows.drop("_row")


def _difference(
    differences: Floats, resamples: int
) -> tuple[float, float | None, float | None, float]:
    ones = np.ones(len(differences), dtype=np.int64)
    means = resampled_means(differences, ones, resamples=resamples)
    lower, upper = percentile_interval(means, len(differences)) or (None, None)
    return float(differences.mean()), lower, upper, sign_flip_p(differences)


def sign_flip_p(differences: Floats, *, seed: int = 0, resamples: int = PERMUTATIONS) -> float:
    """Two-sided p of a permutation test of paired differences, one per task: the share of random
    signs whose sum is at least as far from 0 (Fisher 1935).

    All signs are tried for at most EXACT_DIFFERENCES nonzero differences; else random ones plus the
    observed (Phipson and Smyth 2010). Without nonzero differences p is 1. Raises ValueError for a
    non-finite difference.
    """
    values = np.asarray(differences, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError("a difference is not a finite number")
    values = values[np.abs(values) > _ROUNDING]
    if not len(values):
        return 1.0
    # sums of the same numbers in another order are ties
    observed = abs(values.sum()) * (1 - _ROUNDING) - _ROUNDING
    if len(values) <= EXACT_DIFFERENCES:
        patterns = np.arange(1 << len(values))[:, None] >> np.arange(len(values)) & 1
        return float(np.mean(np.abs((2 * patterns - 1) @ values) >= observed))
    generator, as_far, left = np.random.default_rng(seed), 0, resamples
    while left:
        rows = min(left, 2000)
        signs = generator.integers(0, 2, size=(rows, len(values)), dtype=np.int8) * 2.0 - 1.0
        as_far += int(np.count_nonzero(np.abs(signs @ values) >= observed))
        left -= rows
    return (as_far + 1) / (resamples + 1)
