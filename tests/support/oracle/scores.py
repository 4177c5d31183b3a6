"""Scores of models and of levels, and differences between two models, with their intervals."""

from __future__ import annotations

from typing import Any

import polars as pl

from tests.support.oracle.inputs import Inputs

KS, PS = (1, 5, 10), (0.0, 1.0, 2.0)
RESAMPLES = 500


def scores(frame: pl.DataFrame) -> dict[str, list[Any]]:
    """Adapter: (value, lower, upper, tasks) by "model track metric k"."""
    from tasks.scores import TRACKS, scores

    return {
        f"{row['model']} {row['track']} {row['metric']} {row['k']}": [
            row[name] for name in ("value", "lower", "upper", "tasks")
        ]
        for track in TRACKS
        for row in scores(frame, ks=KS, ps=PS, track=track, resamples=RESAMPLES).to_dicts()
    }


def comparisons(frame: pl.DataFrame, ks: tuple[int, ...]) -> dict[str, list[Any]]:
    """Adapter: (difference, lower, upper, tasks, p, p corrected) by "model baseline track metric
    k"."""
    from tasks.benchmark.comparing import paired_differences

    return {
        f"{row['model']} {row['baseline']} {row['track']} {row['metric']} {row['k']}": [
            row[name] for name in ("difference", "lower", "upper", "tasks", "p", "p_holm")
        ]
        for row in paired_differences(frame, ks=ks, ps=(1.0,), resamples=RESAMPLES).to_dicts()
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
