"""Held-out tasks: which they are.

Guarantees: all rows of a task are on one side; with a share, the side follows from the seed and the
task's id alone, so that a refresh with more tasks moves none across, and with equal share and seed
the held-out tasks are those that publishing puts into its split `test`. Does not guarantee that no
held-out program resembles a training program (deduplication of the tasks is a stage of its own),
nor that a lower loss means better kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt

from kernels_eval.errors import UsageError
from kernels_eval.records import Record
from tasks.sources.holdout import place_of
from tasks.training.formatting import Rows


class EvaluationConfig(Record):
    """Tasks held out of training, whose loss is measured each epoch."""

    share: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """about this share of the tasks is held out; 0: none. 2 % (ours) costs about 1 % of the
    training time: four forward passes over it in three epochs"""
    min_tasks: PositiveInt = 20
    """a share is held out only from sets with at least this many tasks (ours)"""
    tasks: NonNegativeInt | None = None
    """hold out exactly this many tasks instead of a share"""
    seed: NonNegativeInt = 0
    """which tasks; not the recipe's seed, so that runs of several seeds compare"""


def held_out_tasks(task_ids: Iterable[str], config: EvaluationConfig) -> set[str]:
    """Those of the tasks that are held out; repeats of an id do not matter, nor does the order.

    Raises UsageError where nothing would be left to train on.
    """
    names = sorted(set(task_ids))
    if config.tasks is not None:
        by_place = sorted(names, key=lambda name: (place_of(name, config.seed), name))
        chosen = set(by_place[: config.tasks])
    elif len(names) < config.min_tasks:
        chosen = set()
    else:
        chosen = {name for name in names if place_of(name, config.seed) < config.share}
    if names and len(chosen) == len(names):
        raise UsageError(
            f"holding out takes all {len(names)} tasks: nothing is left to train on",
            "hold out fewer, or curate more tasks",
        )
    return chosen


def split_by_task(rows: Rows, config: EvaluationConfig) -> tuple[Rows, Rows]:
    """Rows (with `task_id`) to train on and held-out rows, in their order. Raises UsageError where
    nothing is left to train on."""
    chosen = held_out_tasks((row["task_id"] for row in rows), config)
    sides: tuple[list[Mapping[str, Any]], ...] = ([], [])
    for row in rows:
        sides[row["task_id"] in chosen].append(row)
    return sides[0], sides[1]
