"""Criteria as pure functions from a pool to the rows taken, which depend on data and seed alone.
Drawing needs `_draw` (`draw.with_draw`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

import polars as pl

Order = Literal["min_length", "max_length", "speedup", "random"]
Equality = Literal["exact", "interval"]
LENGTH, SPEEDUP = pl.col("reasoning_tokens"), pl.col("_speedup")
ORDERS: dict[Order, list[pl.Expr]] = {
    "min_length": [LENGTH],
    "max_length": [-LENGTH.cast(pl.Int64)],
    "speedup": [-SPEEDUP],
    "random": [],
}


SHORTEST_THEN_FASTEST = (LENGTH, -SPEEDUP)


def concise_and_fast(eligible: pl.DataFrame, equal: Equality = "exact") -> pl.DataFrame:
    """(a): each task's correct sample that is both shortest in reasoning and fastest, if any.

    Ties qualify for both; the lowest sample_index is taken. With `equal` "interval", samples whose
    speedup's upper bound reaches the fastest's lower bound tie.
    """
    shortest = LENGTH.min().over("task_id") == LENGTH
    return first_per_task(eligible.filter(shortest, is_fastest(equal)))


def is_fastest(equal: Equality = "exact") -> pl.Expr:
    """Whether a sample is as fast as its task's fastest (of several, the lowest bound)."""
    fastest = SPEEDUP.max().over("task_id") == SPEEDUP
    if equal == "interval":
        reach = pl.when(fastest).then(pl.col("_speedup_lower")).min().over("task_id")
        fastest = fastest | (pl.col("_speedup_upper") >= reach)
    return fastest & (SPEEDUP > 0)


def high_speedup(eligible: pl.DataFrame, min_speedup: float) -> pl.DataFrame:
    """(b): correct samples with speedup > min_speedup (strictly); of equal kernels the lowest
    sample_index."""
    return distinct(eligible.filter(min_speedup < SPEEDUP))


def single_operators_wanted(taken: pl.DataFrame, quota: float | int) -> int:
    """How many single operators (c) may add, while (singles + added) < share * (taken + added). A
    float quota is the share; an int quota is a cap, with share 0.5."""
    singles = int(taken["_single"].sum())
    share = Fraction(str(quota)) if isinstance(quota, float) else Fraction(1, 2)
    wanted = max(0, math.ceil((share * taken.height - singles) / (1 - share)))
    return wanted if isinstance(quota, float) else min(wanted, quota)


def best_per_task(
    eligible: pl.DataFrame, taken: pl.DataFrame, order: Sequence[pl.Expr]
) -> pl.DataFrame:
    """Each task's first sample not yet taken, by task_id. Ties: the lower sample_index."""
    rows = without(eligible, taken)
    return first_per_task(rows.sort("task_id", *order, "sample_index", "candidate_id"))


def ranked(pool: pl.DataFrame, order: Order, max_per_task: int | None) -> pl.DataFrame:
    """The pool in a baseline's order, at most `max_per_task` of each task; of equal kernels the
    first. Ties are drawn. "speedup" leaves out untimed samples."""
    rows = pool.filter(SPEEDUP > 0) if order == "speedup" else pool
    rows = rows.sort(*ORDERS[order], "_draw", "candidate_id")
    if max_per_task == 1:  # no kernel twice
        return first_per_task(rows)
    rows = distinct(rows)
    if max_per_task is None:
        return rows
    return rows.filter(pl.int_range(pl.len()).over("task_id") < max_per_task)


def balanced(rows: pl.DataFrame, size: int, quota: float | int) -> pl.DataFrame:
    """The first rows of each kind, in order, with single operators at the quota's share of `size`
    (an int: that number, at most half). Where one kind has too few, the other fills up."""
    exact = math.floor(Fraction(str(quota)) * size)
    aim = exact if isinstance(quota, float) else min(quota, size // 2)
    singles = int(rows["_single"].sum())
    of_singles = min(singles, max(aim, size - (rows.height - singles)))
    limit = pl.when("_single").then(of_singles).otherwise(size - of_singles)
    return rows.filter(pl.int_range(pl.len()).over("_single") < limit)


def first_per_task(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.unique(subset="task_id", keep="first", maintain_order=True)


def distinct(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.unique(subset="_kernel", keep="first", maintain_order=True)


def without(rows: pl.DataFrame, taken: pl.DataFrame) -> pl.DataFrame:
    return rows.join(taken.select("_kernel"), on="_kernel", how="anti", maintain_order="left")
