"""Groups of tasks: by level, by kind and family of operator, by third of reasoning length.

Guarantees: the order of groups is theirs. Does not guarantee that groups differ for the reason they
are named after: tasks of a level differ in much more. Families overlap, so their tasks do not add
up.
"""

from __future__ import annotations

import polars as pl

from tasks.arl import LEVEL_OF_TASK, arl_thirds

NOT_COUNTED = "not counted"


def level_groups(tasks: pl.DataFrame) -> pl.DataFrame:
    """Rows (task_id, group) from rows with `task_id` and `level`, levels in order. Tasks without a
    level are in no group."""
    known = tasks.drop_nulls("level").sort("level", maintain_order=True)
    return known.select("task_id", group=pl.col("level").cast(pl.String))


def operator_groups(workloads: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """Kinds (single_operator, fusion) and families as rows (task_id, group), from rows of the stage
    "workloads" (task_id, operator_kind, families).

    A task is in every family of its operators. What could not be run is "not counted". The largest
    groups come first.
    """
    unknown = pl.col("operator_kind").is_null()
    kinds = workloads.select("task_id", group=pl.col("operator_kind").fill_null(NOT_COUNTED))
    families = workloads.select(
        "task_id", group=pl.when(unknown).then([NOT_COUNTED]).otherwise("families")
    )
    families = families.explode("group").drop_nulls()
    return {
        "operator_kind": _largest_first(kinds),
        "operator_family": _largest_first(families),
    }


def length_groups(candidates: pl.DataFrame) -> pl.DataFrame:
    """Thirds of tasks by ARL within KernelBench's levels, as rows (task_id, group), from rows with
    `task_id` and `reasoning_tokens`.

    Give rows of one generator, best of another one than those that are scored: a model's own
    failures are long, and make the long third look hard.
    """
    thirds = arl_thirds(candidates.with_columns(stratum=LEVEL_OF_TASK))
    return thirds.select("task_id", group=pl.col("third").cast(pl.String))


def _largest_first(groups: pl.DataFrame) -> pl.DataFrame:
    size = pl.len().over("group")
    order = (pl.col("group") == NOT_COUNTED, -size.cast(pl.Int64), pl.col("group"))
    return groups.sort(*order, maintain_order=True)
