"""Changes between two training sets, by joining their decisions: the reason is the other side's
decision on the candidate, or that it has none."""

from __future__ import annotations

import polars as pl

from tasks.tables import DECISIONS, columns_of, completed

KEYS = ("candidate_id", "task_id")
COMPARED = (
    *("criterion", "why_not", "status", "reasoning_tokens", "speedup"),
    *("shortest_tokens", "fastest_speedup"),
)
TOLERATED = 1e-12  # a relative difference of two speedups that is no change
NO_CANDIDATE, NO_TASK, UNKNOWN = "no_candidate", "no_task", "unknown"
OTHER_CRITERION, OTHER_SPEEDUP = "other_criterion", "other_speedup"


def changes(old: pl.DataFrame, new: pl.DataFrame) -> pl.DataFrame:
    """One row per sample in only one set, or in both with another criterion or speedup.

    Frames are tasks.tables.DECISIONS; without why_not reasons are unknown. Columns: candidate_id,
    task_id, `change` (gained, lost, changed), `reason`, and `COMPARED` as `_old` and `_new`.
    """
    columns = columns_of(DECISIONS)
    sides = {"old": completed(old, columns), "new": completed(new, columns)}
    taken = pl.concat([side.filter("taken").select(KEYS) for side in sides.values()]).unique(KEYS)
    decided = {"old": "why_not" in old.columns, "new": "why_not" in new.columns}
    for name, side in sides.items():
        renamed = {column: f"{column}_{name}" for column in ("taken", *COMPARED)}
        known = side.select(*KEYS, *renamed).rename(renamed)
        tasks = side["task_id"].unique().implode()
        taken = taken.join(known, on=KEYS, how="left").with_columns(
            pl.col("task_id").is_in(tasks).alias(f"has_task_{name}"),
            pl.lit(decided[name]).alias(f"decided_{name}"),
        )
    before, after = (pl.col(f"taken_{name}").fill_null(False) for name in sides)
    speedups = pl.col("speedup_old"), pl.col("speedup_new")
    apart = (speedups[0] - speedups[1]).abs() > TOLERATED * speedups[0].abs()
    other_speedup = (apart | (speedups[0].is_null() != speedups[1].is_null())).fill_null(False)
    other_criterion = pl.col("criterion_old") != pl.col("criterion_new")
    both = (
        pl.when(other_criterion)
        .then(pl.lit(OTHER_CRITERION))
        .when(other_speedup)
        .then(pl.lit(OTHER_SPEEDUP))
    )
    return (
        taken.with_columns(
            change=pl.when(~before)
            .then(pl.lit("gained"))
            .when(~after)
            .then(pl.lit("lost"))
            .otherwise(pl.lit("changed")),
            reason=pl.when(~before)
            .then(_why("old"))
            .when(~after)
            .then(_why("new"))
            .otherwise(both),
        )
        .filter(pl.col("reason").is_not_null())
        .select(*KEYS, "change", "reason", *(f"{c}_{name}" for c in COMPARED for name in sides))
        .sort("task_id", "candidate_id")
    )


def reason_counts(rows: pl.DataFrame) -> dict[str, dict[str, int]]:
    counts = rows.group_by("change", "reason").len()
    counts = counts.sort("len", "change", "reason", descending=[True, False, False])
    found: dict[str, dict[str, int]] = {"gained": {}, "lost": {}, "changed": {}}
    for change, reason, count in counts.iter_rows():
        found[change][reason] = count
    return found


def _why(side: str) -> pl.Expr:
    absent = pl.when(f"has_task_{side}").then(pl.lit(NO_CANDIDATE)).otherwise(pl.lit(NO_TASK))
    absent = pl.when(f"decided_{side}").then(absent).otherwise(pl.lit(UNKNOWN))
    return pl.coalesce(f"why_not_{side}", absent)
