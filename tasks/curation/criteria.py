"""One pure function per criterion: a pool of samples in, the rows that this criterion takes out.

Guarantees: every function reads only the columns that its criterion is about, keeps the columns of
the pool, and depends on the data and the seeded order alone. Does not guarantee that what two
criteria take is disjoint: `strategies` leaves out what was taken before.

The pool is what `tasks.curation.pool.pool_of` returns; functions that draw need `_draw`
too (`draw.with_draw`).
"""

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
    """(a): per task, the correct sample that is both the shortest in reasoning and the fastest; no
    sample where those are two.

    Ties: a sample as short as the shortest and as fast as the fastest qualifies; of several, the
    lowest sample_index is taken. A task's only correct sample is both. A sample without a timing is
    never the fastest. With `equal` "interval", a sample is as fast as the fastest where the upper
    bound of its speedup reaches the fastest's lower bound.
    """
    shortest = LENGTH.min().over("task_id") == LENGTH
    return first_per_task(eligible.filter(shortest, is_fastest(equal)))


def is_fastest(equal: Equality = "exact") -> pl.Expr:
    """Whether a sample is as fast as its task's fastest. Where several are the fastest, the lowest
    of their lower bounds is the one to reach."""
    fastest = SPEEDUP.max().over("task_id") == SPEEDUP
    if equal == "interval":
        reach = pl.when(fastest).then(pl.col("_speedup_lower")).min().over("task_id")
        fastest = fastest | (pl.col("_speedup_upper") >= reach)
    return fastest & (SPEEDUP > 0)


def high_speedup(eligible: pl.DataFrame, min_speedup: float) -> pl.DataFrame:
    """(b): every correct sample with speedup > min_speedup (strictly), however long its reasoning;
    of equal kernels of a task the lowest sample_index."""
    return distinct(eligible.filter(min_speedup < SPEEDUP))


def single_operators_wanted(taken: pl.DataFrame, quota: float | int) -> int:
    """How many single operators (c) adds to the samples taken, where there are enough.

    One after the other is added while single operators are below the share (a float quota; an int
    quota caps how many are added, and 0.5 ends it too): while (singles + added) < share * (taken +
    added). Computed exactly, not in floating point.
    """
    singles = int(taken["_single"].sum())
    share = Fraction(str(quota)) if isinstance(quota, float) else Fraction(1, 2)
    wanted = max(0, math.ceil((share * taken.height - singles) / (1 - share)))
    return wanted if isinstance(quota, float) else min(wanted, quota)


def best_per_task(
    eligible: pl.DataFrame, taken: pl.DataFrame, order: Sequence[pl.Expr]
) -> pl.DataFrame:
    """Each task's first sample in an order, of those not yet taken, in order of task_id. Ties: the
    lower sample_index."""
    rows = without(eligible, taken)
    return first_per_task(rows.sort("task_id", *order, "sample_index", "candidate_id"))


def ranked(pool: pl.DataFrame, order: Order, max_per_task: int | None) -> pl.DataFrame:
    """The pool in the order in which a baseline takes from it, at most `max_per_task` of each task:
    those that come first, and of equal kernels the first.

    Ties are drawn, so that no second criterion comes in. "speedup" leaves out samples that were not
    timed.
    """
    rows = pool.filter(SPEEDUP > 0) if order == "speedup" else pool
    rows = rows.sort(*ORDERS[order], "_draw", "candidate_id")
    if max_per_task == 1:  # no kernel twice
        return first_per_task(rows)
    rows = distinct(rows)
    if max_per_task is None:
        return rows
    return rows.filter(pl.int_range(pl.len()).over("task_id") < max_per_task)


def balanced(rows: pl.DataFrame, size: int, quota: float | int) -> pl.DataFrame:
    """The first rows of each kind, so that single operators are the quota's share of `size` (an
    int: that number, and half at most).

    Where one kind has too few, the other fills up: the size is kept rather than the balance. Keeps
    the order of `rows`.
    """
    exact = math.floor(Fraction(str(quota)) * size)
    aim = exact if isinstance(quota, float) else min(quota, size // 2)
    singles = int(rows["_single"].sum())
    of_singles = min(singles, max(aim, size - (rows.height - singles)))
    limit = pl.when("_single").then(of_singles).otherwise(size - of_singles)
    return rows.filter(pl.int_range(pl.len()).over("_single") < limit)


def first_per_task(rows: pl.DataFrame) -> pl.DataFrame:
    """The first row of each task, in the order of the rows."""
    return rows.unique(subset="task_id", keep="first", maintain_order=True)


def distinct(rows: pl.DataFrame) -> pl.DataFrame:
    """The first row of each kernel, in the order of the rows."""
    return rows.unique(subset="_kernel", keep="first", maintain_order=True)


def without(rows: pl.DataFrame, taken: pl.DataFrame) -> pl.DataFrame:
    """The rows whose kernel is not in `taken`, in their order."""
    return rows.join(taken.select("_kernel"), on="_kernel", how="anti", maintain_order="left")
