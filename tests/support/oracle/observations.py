"""Reasoning length against correctness, against speedup, and as a measure of difficulty."""

from __future__ import annotations

from typing import Any

import polars as pl

from tests.support.oracle.inputs import Inputs


def accuracy_by_length(frame: pl.DataFrame) -> list[list[Any]]:
    """Adapter: (from_tokens, samples, correct, accuracy, lower, upper) of the paper's bins."""
    bins = _observed(frame).everything.bins
    return [
        [row.from_tokens, row.samples, row.correct, row.accuracy, row.lower, row.upper]
        for row in bins
    ]


def within_tasks(frame: pl.DataFrame) -> dict[str, Any]:
    """Adapter: odds ratios of being correct among samples of one task, per standard deviation of
    the length and of its rank."""
    found = _observed(frame).everything.within
    return {
        "tasks": found.tasks,
        "samples": found.samples,
        "per sd of tokens": _numbers(found.odds_ratio),
        "per sd of ranks": _numbers(found.rank_odds_ratio),
    }


def length_and_speedup(frame: pl.DataFrame) -> dict[str, Any]:
    """Adapter: Spearman's rho of length and speedup over correct, timed samples."""
    found = _observed(frame).speedup
    return {"samples": found.samples, "tasks": found.tasks, "rho": _numbers(found.spearman)}


def thirds(frame: pl.DataFrame) -> list[list[Any]]:
    """Adapter: (tasks, from_arl, to_arl, Exec, its bounds, geometric-mean speedup) of thirds of
    the tasks by ARL, short to long."""
    from tasks.analysis.difficulty import difficulty

    division = difficulty(frame).tertiles
    return [
        [
            row.tasks,
            row.from_arl,
            row.to_arl,
            row.exec.value,
            row.exec.lower,
            row.exec.upper,
            row.speedup.value,
        ]
        for row in (division.groups if division else ())
    ]


_known: dict[int, Any] = {}


def _observed(frame: pl.DataFrame) -> Any:
    from tasks.analysis.config import ObservationConfig
    from tasks.analysis.observations import observe

    if id(frame) not in _known:
        _known[id(frame)] = observe(frame, ObservationConfig(permutations=199))
    return _known[id(frame)]


def _numbers(estimate: Any) -> list[float | None]:
    return [estimate.value, estimate.lower, estimate.upper]


def section(inputs: Inputs) -> Any:
    frame = inputs.judged
    parts = {"all": frame, "level 1": frame.filter(level=1)}
    return {
        name: {
            "accuracy by length": accuracy_by_length(part),
            "within tasks": within_tasks(part),
            "length and speedup": length_and_speedup(part),
            "thirds": thirds(part),
        }
        for name, part in parts.items()
    }
