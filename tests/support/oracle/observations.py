"""Reasoning length against correctness, against speedup, and as a measure of difficulty."""

from __future__ import annotations

from typing import Any

import polars as pl

from tests.support.oracle.inputs import Inputs


def accuracy_by_length(found: Any) -> list[list[Any]]:
    """Adapter: (from_tokens, samples, correct, accuracy, lower, upper) of the paper's bins."""
    names = ("from_tokens", "samples", "correct", "accuracy", "lower", "upper")
    return [[row[name] for name in names] for row in found.bins]


def within_tasks(found: Any) -> dict[str, Any]:
    """Adapter: odds ratio of being correct among samples of one task, per standard deviation of the
    length's rank."""
    odds = found.estimate("odds_ratio_within_tasks")
    return {"tasks": odds.tasks, "samples": odds.n, "per sd of ranks": _numbers(odds)}


def length_and_speedup(found: Any) -> dict[str, Any]:
    """Adapter: Spearman's rho of length and speedup over correct, timed samples."""
    rho = found.estimate("spearman_of_length_and_speedup")
    return {"samples": rho.n, "tasks": rho.tasks, "rho": _numbers(rho)}


def thirds(found: Any) -> list[list[Any]]:
    """Adapter: (tasks, from_arl, to_arl, Exec, its bounds, geometric-mean speedup) of thirds of
    the tasks by ARL, short to long."""
    names = ("tasks", "from_arl", "to_arl", "exec", "exec_lower", "exec_upper", "speedup")
    return [[row[name] for name in names] for row in found.thirds]


def _numbers(estimate: Any) -> list[float | None]:
    return [estimate.value, estimate.lower, estimate.upper]


def section(inputs: Inputs) -> Any:
    from tasks.observe.observations import observe

    frame: pl.DataFrame = inputs.judged
    found = {"all": observe(frame), "level 1": observe(frame.filter(level=1))}
    return {
        name: {
            "accuracy by length": accuracy_by_length(part),
            "within tasks": within_tasks(part),
            "length and speedup": length_and_speedup(part),
            "thirds": thirds(part),
        }
        for name, part in found.items()
    }
