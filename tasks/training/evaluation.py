"""The choice of held-out tasks: a share is chosen by task id, so new tasks move none; an equal
share with seed 0 is the published split `test`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kernels_eval.errors import UsageError
from tasks.sources.holdout import place_of
from tasks.training.formatting import Rows

SEED = 0
"""Not the recipe's seed, so that runs of several seeds compare."""
LEAST_TASKS = 20
"""Fewest tasks of a set from which a share is held out (ours)."""


def held_out_tasks(task_ids: Iterable[str], held_out: float) -> set[str]:
    """The held-out tasks: a share of the tasks or, from 1 on, a number of them. Raises UsageError
    where nothing would be left to train on."""
    places = {name: place_of(name, SEED) for name in sorted(set(task_ids))}
    if held_out >= 1:
        by_place = sorted(places, key=lambda name: (places[name], name))
        chosen = set(by_place[: int(held_out)])
    elif len(places) < LEAST_TASKS:
        chosen = set()
    else:
        chosen = {name for name, place in places.items() if place < held_out}
    if places and len(chosen) == len(places):
        raise UsageError(
            f"holding out takes all {len(places)} tasks: nothing is left to train on",
            "hold out fewer (training.held_out), or curate more tasks",
        )
    return chosen


def split_by_task(rows: Rows, held_out: float) -> tuple[Rows, Rows]:
    """Rows (with `task_id`) to train on and held-out rows, in order. Raises UsageError where
    nothing is left to train on."""
    chosen = held_out_tasks((row["task_id"] for row in rows), held_out)
    training: list[Mapping[str, Any]] = []
    kept_out: list[Mapping[str, Any]] = []
    for row in rows:
        side = kept_out if row["task_id"] in chosen else training
        side.append(row)
    return training, kept_out
