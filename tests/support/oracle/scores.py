"""Scores of models and of levels, and differences between two models, with their intervals."""

from __future__ import annotations

from typing import Any

import polars as pl

from tests.support.oracle.inputs import Inputs

KS, PS = (1, 5, 10), (0.0, 1.0, 2.0)
RESAMPLES = 500


def scores(frame: pl.DataFrame) -> dict[str, list[Any]]:
    """Adapter: (value, lower, upper, tasks) by "model track metric k"."""
    from tasks.benchmark.scoring import score

    return {
        f"{row.model} {row.track} {row.metric} {row.k}": [
            row.value,
            row.lower,
            row.upper,
            row.tasks,
        ]
        for row in score(frame, ks=KS, ps=PS, resamples=RESAMPLES)
    }


def comparisons(frame: pl.DataFrame, ks: tuple[int, ...]) -> dict[str, list[Any]]:
    """Adapter: (difference, lower, upper, tasks, p, p corrected) by "model baseline track metric
    k"."""
    from tasks.benchmark.comparing import compare_all

    return {
        f"{row.model} {row.baseline} {row.track} {row.metric} {row.k}": [
            row.difference,
            row.lower,
            row.upper,
            row.tasks,
            row.p,
            row.p_holm,
        ]
        for row in compare_all(frame, ks=ks, ps=(1.0,), resamples=RESAMPLES)
    }


def section(inputs: Inputs) -> Any:
    frame = inputs.judged
    answered = pl.len().over("model", "task_id")
    enough = frame.filter(answered >= max(KS))
    found: dict[str, Any] = {"all": scores(enough)}
    for level in (1, 2):
        found[f"level {level}"] = scores(enough.filter(pl.col("level") == level))
    found["too few samples"] = scores(frame)
    found["one task"] = scores(enough.filter(pl.col("task_id") == enough["task_id"][0]))
    found["comparisons"] = comparisons(frame, (1,))
    found["comparisons at 5"] = comparisons(frame.filter(answered >= 5), (1, 5))
    return found
