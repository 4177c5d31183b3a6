"""Scores of groups of tasks: by level, by kind and family of operator, by third of reasoning
length.

Guarantees: a group is scored as a whole benchmark is, with the same refusals; the order of groups
is theirs. Does not guarantee that groups differ for the reason they are named after: tasks of a
level differ in much more. Groups may overlap (a task has all families that its operators belong
to), so their tasks do not add up.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import polars as pl

from tasks.benchmark.metrics import Interval
from tasks.benchmark.scoring import ScoreRow, score

By = Literal["level", "operator_kind", "operator_family", "arl_third"]
Groups = Mapping[str, Collection[str]]
THIRDS = ("short", "middle", "long")
NOT_COUNTED = "not counted"


class GroupRow(ScoreRow):
    """A score over one group of tasks, such as by "level", group "2"."""

    by: By
    group: str


def level_groups(tasks: pl.DataFrame) -> dict[str, list[str]]:
    """level -> task ids, from rows with `task_id` and `level`, levels in order. Tasks without a
    level are in no group."""
    found = _grouped(tasks.drop_nulls("level"), "level")
    return {str(level): found[level] for level in sorted(found)}


def operator_groups(workloads: pl.DataFrame) -> dict[By, dict[str, list[str]]]:
    """Kinds (single_operator, fusion) and families -> task ids, from rows of the stage "workloads"
    (task_id, operator_kind, families).

    A task is in every family of its operators. What could not be run is "not counted". The largest
    groups come first.
    """
    none = pl.col("operator_kind").is_null()
    frame = workloads.with_columns(
        operator_kind=pl.col("operator_kind").fill_null(NOT_COUNTED),
        operator_family=pl.when(none).then(pl.lit([NOT_COUNTED])).otherwise("families"),
    )
    kinds = _grouped(frame, "operator_kind")
    families = _grouped(frame.explode("operator_family").drop_nulls(), "operator_family")
    return {
        "operator_kind": _largest_first(kinds),
        "operator_family": _largest_first(families),
    }


def arl_groups(frame: pl.DataFrame) -> dict[str, list[str]]:
    """Thirds of tasks by ARL, the mean `reasoning_tokens` of a task's rows: short, middle, long.
    Rows without a length are left out.

    Thirds are taken within KernelBench's levels, which differ in length and in token limits: each
    holds a third of either level. Give rows of one generator (lengths of two tokenizers do not
    mix), best of another one than those that are scored: a model's own failures are long, and make
    the long third look hard. Fewer than three tasks have no thirds: the result is empty.
    """
    rank = pl.struct("reasoning_tokens", "task_id").rank("ordinal").cast(pl.Int64)
    known = (
        frame.drop_nulls("reasoning_tokens")
        .group_by("task_id")
        .agg(pl.col("reasoning_tokens").mean())
        .with_columns(level=pl.col("task_id").str.extract(r"(?:^|/)L(\d+)/"))
        .with_columns(third=((rank - 1) * len(THIRDS) // pl.len()).over("level"))
        .sort("reasoning_tokens", "task_id")
    )
    if known.height < len(THIRDS):
        return {}
    parts = known.partition_by("third", as_dict=True)
    return {
        name: parts[(number,)]["task_id"].to_list() if (number,) in parts else []
        for number, name in enumerate(THIRDS)
    }


def score_groups(
    frame: pl.DataFrame,
    groups: Mapping[By, Groups],
    *,
    ks: Sequence[int],
    resamples: int = 2000,
) -> list[GroupRow]:
    """`score` of every group, in their order. A group that no verdict belongs to has no rows.
    Raises UsageError as `score` does."""
    rows: list[GroupRow] = []
    for by, named in groups.items():
        for group, tasks in named.items():
            part = frame.filter(pl.col("task_id").is_in(list(tasks)))
            if part.height:
                scores = score(part, ks=ks, ps=(1.0,), resamples=resamples)
                rows += [GroupRow(**row.model_dump(), by=by, group=group) for row in scores]
    return rows


def gap(first: ScoreRow, second: ScoreRow) -> tuple[float, Interval] | None:
    """`first` minus `second`, two shares over different tasks, with a 95 % interval; None where one
    has no value or no interval.

    Square-and-add of the two intervals (Newcombe 1998, method 10; for other intervals than
    Wilson's, Zou and Donner 2008): each end takes the distances on its own side, so intervals that
    are not symmetric stay so. For tasks that both share, use `compare_all`.
    """
    if first.value is None or second.value is None:
        return None
    if first.lower is None or first.upper is None or second.lower is None or second.upper is None:
        return None
    value = first.value - second.value
    below = math.hypot(first.value - first.lower, second.upper - second.value)
    above = math.hypot(first.upper - first.value, second.value - second.lower)
    return value, Interval(value - below, value + above)


def _grouped(frame: pl.DataFrame, column: str) -> dict[Any, list[str]]:
    """Task ids by a column, groups and tasks in the order of the rows."""
    return dict(frame.group_by(column, maintain_order=True).agg("task_id").iter_rows())


def _largest_first(groups: dict[str, list[str]]) -> dict[str, list[str]]:
    return dict(
        sorted(groups.items(), key=lambda item: (item[0] == NOT_COUNTED, -len(item[1]), item[0]))
    )
