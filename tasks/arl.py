"""Difficulty of tasks by ARL, the average reasoning length of a task's samples (arXiv 2510.07356).
A model's own failures are long, so ARL is no proof of difficulty."""

from __future__ import annotations

import polars as pl

THIRDS = ("short", "middle", "long")
"""By ARL: what the paper calls easy, medium and hard."""
LEVEL_OF_TASK = pl.col("task_id").str.extract(r"(?:^|/)L(\d+)/")
"""The level in the ids of KernelBench's tasks, null in others."""


def arl_thirds(samples: pl.DataFrame) -> pl.DataFrame:
    """Return each task's third, from short to long: task_id, arl (tokens), third.

    `samples` has task_id, reasoning_tokens and `stratum`, within which tasks are ranked. Samples
    without a length are left out. Fewer than three tasks have no thirds.
    """
    tasks = (
        samples.drop_nulls("reasoning_tokens")
        .group_by("task_id")
        .agg(pl.col("stratum").first(), arl=pl.col("reasoning_tokens").mean())
    )
    if tasks.height < len(THIRDS):
        tasks = tasks.clear()
    rank = pl.struct("arl", "task_id").rank("ordinal")
    beyond = [rank > (pl.len() * edge / 3).round() for edge in (1, 2)]
    number = pl.sum_horizontal(beyond).over("stratum")
    third = number.replace_strict(dict(enumerate(THIRDS)), return_dtype=pl.Enum(THIRDS))
    return tasks.select("task_id", "arl", third=third).sort("third", "arl", "task_id")
