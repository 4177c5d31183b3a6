"""Groups of tasks by level, operator kind and family, and reasoning length. Families overlap."""

from __future__ import annotations

import polars as pl

from tasks.arl import LEVEL_OF_TASK, arl_thirds

NOT_COUNTED = "not counted"


def level_groups(tasks: pl.DataFrame) -> pl.DataFrame:
    """Rows (task_id, group) of `task_id` and `level`, levels in order; null levels are left out."""
    known = tasks.drop_nulls("level").sort("level", maintain_order=True)
    return known.select("task_id", group=pl.col("level").cast(pl.String))


def operator_groups(workloads: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """Kinds (single_operator, fusion) and families as rows (task_id, group), largest first, from
    stage "workloads". A task that could not be run is "not counted"."""
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
    """Thirds of tasks by ARL within KernelBench's levels: rows (task_id, group). Use one generator,
    not a scored model: its own failures make the long third look hard."""
    thirds = arl_thirds(candidates.with_columns(stratum=LEVEL_OF_TASK))
    return thirds.select("task_id", group=pl.col("third").cast(pl.String))


def _largest_first(groups: pl.DataFrame) -> pl.DataFrame:
    size = pl.len().over("group")
    order = (pl.col("group") == NOT_COUNTED, -size.cast(pl.Int64), pl.col("group"))
    return groups.sort(*order, maintain_order=True)
