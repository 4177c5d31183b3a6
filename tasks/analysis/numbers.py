"""The headline numbers of an analysis as rows: what a table shows and what runs are compared by.

Guarantees: every row has its value or the reason why there is none, never both; names do not depend
on the data. Holds no curve: bins, tenths and groups of tasks are in the records.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from tasks.analysis.difficulty import Difficulty
from tasks.analysis.estimates import Estimate
from tasks.analysis.observations import Observations, Population

NUMBERS = pa.schema(
    [
        ("name", pa.string()),
        ("value", pa.float64()),
        ("lower", pa.float64()),  # of its 95 % interval
        ("upper", pa.float64()),
        ("p", pa.float64()),
        ("samples", pa.int64()),
        ("tasks", pa.int64()),
        ("method", pa.string()),
        ("why_not", pa.string()),  # why there is no value; null where there is one
    ]
)


def number_rows(observations: Observations, difficulty: Difficulty) -> list[dict[str, Any]]:
    """Rows of NUMBERS. Ratios, shares and correlations, as the records define them; `..._tokens`
    are tokens.

    `all/` is of all samples, `complete/` of those that the token limit did not cut off (absent
    where it cut off none).
    """
    rows = [*_of_population("all", observations.everything)]
    if observations.complete is not None:
        rows += _of_population("complete", observations.complete)
    speed = observations.speedup
    rows += [
        _row("speedup/pearson", speed.pearson),
        _row("speedup/pearson_of_log", speed.pearson_log),
        _row("speedup/spearman", speed.spearman),
        _row("speedup/factor_within_tasks_per_sd", speed.within),
        _row("difficulty/spearman_of_arl_and_exec", difficulty.arl_exec),
        _row("difficulty/reliability_of_arl", difficulty.reliability),
    ]
    return rows


def _of_population(name: str, found: Population) -> Iterator[dict[str, Any]]:
    share = Estimate(
        value=found.correct / found.samples, n=found.samples, tasks=found.tasks, method="share"
    )
    yield _row(f"{name}/share_correct", share)
    for outcome, spread in (
        ("correct", found.correct_lengths),
        ("incorrect", found.incorrect_lengths),
    ):
        if spread is not None:
            median = Estimate(
                value=spread.median,
                lower=spread.median_lower,
                upper=spread.median_upper,
                n=spread.samples,
            )
            yield _row(
                f"{name}/median_{outcome}_tokens",
                median.model_copy(update={"method": "order statistics"}),
            )
    yield _row(f"{name}/longer_if_incorrect", found.longer_if_incorrect)
    yield _row(f"{name}/odds_ratio_pooled", found.pooled)
    within = found.within
    yield _row(f"{name}/odds_ratio_within_tasks_per_sd", within.odds_ratio)
    yield _row(f"{name}/odds_ratio_within_tasks_per_unit", within.odds_ratio_per_unit)
    yield _row(f"{name}/change_of_share_within_tasks_per_sd", within.slope)
    if within.permutation_p is not None:
        test = Estimate(
            value=within.permutation_p,
            n=within.samples,
            tasks=within.tasks,
            method=f"{within.permutations} permutations",
        )
        yield _row(f"{name}/permutation_p_within_tasks", test)


def _row(name: str, found: Estimate) -> dict[str, Any]:
    bounds = {"value": found.value, "lower": found.lower, "upper": found.upper, "p": found.p}
    why_not = None if found.value is not None else found.why_not or "unknown"
    return {
        "name": name,
        **bounds,
        "samples": found.n,
        "tasks": found.tasks,
        "method": found.method,
        "why_not": why_not,
    }
