"""A strategy's decisions: the rows taken, and a table of every candidate with the first reason that
applies and its numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.records import Json
from tasks.curation.choice import Choice
from tasks.curation.config import CurationConfig
from tasks.curation.criteria import LENGTH, SPEEDUP, is_fastest
from tasks.curation.draw import Array
from tasks.curation.pool import CUT_OFF, marked, pool_of
from tasks.curation.reasons import MEANING, WhyNot
from tasks.curation.strategies import choose, strategy_of
from tasks.scores import known_ratio
from tasks.tables import DECISIONS, columns_of, completed


class Decided(NamedTuple):
    """`taken`: rows of the frame, in the order of the rule, with `criterion`. `decisions`:
    tasks.tables.DECISIONS, one row per candidate."""

    taken: pl.DataFrame
    decisions: pl.DataFrame


def decide(frame: pl.DataFrame, config: CurationConfig) -> Decided:
    """Apply a strategy to verdicts joined with their candidates.

    Taken rows add `criterion` and, where reasoning moves, `reasoning_from`, the candidate whose
    reasoning a row holds. Raises UsageError as `tasks.curation.pool.marked` and `donors` do.
    """
    rows = marked(frame, config)
    pool = pool_of(rows, config)
    choice = choose(pool, config)
    return Decided(_taken_rows(frame, choice, config), _table(rows, choice, config))


def curate(frame: pl.DataFrame, config: CurationConfig) -> pl.DataFrame:
    choice = choose(pool_of(marked(frame, config), config), config)
    return _taken_rows(frame, choice, config)


def explained(decisions: pl.DataFrame, candidate_id: str) -> Json:
    """The decision on the candidate whose id is so or begins so, with `meaning`, its reason in
    words. Raises UsageError where there is none or several."""
    found = decisions.filter(candidate_id=candidate_id)
    if found.is_empty():
        found = decisions.filter(pl.col("candidate_id").str.starts_with(candidate_id))
    if found.height != 1:
        raise UsageError(
            f"{found.height or 'no'} candidates of {decisions.height} begin with {candidate_id!r}",
            "give a candidate_id of the verdicts",
        )
    row = found.row(0, named=True)
    return row | {"meaning": MEANING[WhyNot(row["why_not"])] if row["why_not"] else None}


# -- the rows taken --------------------------------------------------------------------------------


def _taken_rows(frame: pl.DataFrame, choice: Choice, config: CurationConfig) -> pl.DataFrame:
    taken = choice.taken
    rows = frame[taken["_row"]].with_columns(taken["criterion"])
    if config.cut_off_answers:  # what training reads, however it is known
        cut = taken.select(pl.when(pl.col("_ended").is_in(CUT_OFF)).then(pl.lit("length")))
        rows = rows.with_columns(cut.to_series().alias("finish_reason"))
    if not strategy_of(config.strategy).moves_reasoning:
        return rows
    givers = rows[donors(taken)]
    moved = [givers[name] for name in ("reasoning", "reasoning_tokens") if name in rows.columns]
    return rows.with_columns(*moved, reasoning_from=givers["candidate_id"].cast(pl.String))


def donors(taken: pl.DataFrame) -> Array:
    """For each sample, the place of the one whose reasoning it gets, never of its own task. Raises
    UsageError where one task has more than half of the samples: then no permutation exists."""
    if taken.is_empty():
        return np.empty(0, dtype=np.int64)
    most = taken.group_by("task_id").len()["len"].to_numpy().max()
    if 2 * most > taken.height:
        raise UsageError(
            f"reasoning cannot be moved between tasks: {most} of {taken.height} samples are of one"
            " task",
            "curate from more tasks",
        )
    numbered = taken.with_row_index("_place").with_columns(
        _task_draw=pl.col("_draw").min().over("task_id")
    )
    ordered = numbered.sort("_task_draw", "task_id", "_draw", "candidate_id")
    order = ordered["_place"].to_numpy().astype(np.int64)
    found = np.empty(len(order), dtype=np.int64)
    found[order] = np.roll(order, -int(most))
    return found


# -- the table -------------------------------------------------------------------------------------


def _table(rows: pl.DataFrame, choice: Choice, config: CurationConfig) -> pl.DataFrame:
    decided = _decided_pool(choice, config)
    table = (
        rows.sort("_row")
        .with_columns(
            speedup=known_ratio(rows, "speedup"),
            speedup_lower=known_ratio(rows, "speedup_lower"),
            single_operator="_single",
            ended="_ended",
        )
        .join(decided, on="_row", how="left", maintain_order="left")
        .with_columns(
            why_not=pl.coalesce("_why_not", "why_not"),
            taken=pl.col("taken").fill_null(False),
        )
    )
    columns = columns_of(DECISIONS)
    return completed(table, columns).select(list(columns)).cast(columns)


def _decided_pool(choice: Choice, config: CurationConfig) -> pl.DataFrame:
    taken = choice.taken.select("_row", "criterion", taken=pl.lit(True))
    equal = choice.taken.select("_kernel", equals="candidate_id")
    passed_over = choice.passed_over.rename({"criterion": "passed_by"})
    return (
        choice.pool.with_columns(
            correct_in_task="_rivals",
            shortest_tokens=LENGTH.min().over("task_id"),
            fastest_speedup=SPEEDUP.max().over("task_id"),
            compared=_comparison(config),
        )
        .join(taken, on="_row", how="left")
        .join(equal, on="_kernel", how="left")
        .join(passed_over, on="_row", how="left")
        .select(
            *("_row", "correct_in_task", "shortest_tokens", "fastest_speedup"),
            taken=pl.col("taken").fill_null(False),
            criterion=pl.coalesce("criterion", "passed_by"),
            equals=pl.when(pl.col("taken").is_null()).then("equals"),
            why_not=pl.when(pl.col("taken").is_null()).then(
                pl.coalesce(
                    "_unmet",
                    pl.when(pl.col("equals").is_not_null()).then(pl.lit(WhyNot.EQUAL_KERNEL.value)),
                    "why",
                    "compared",
                )
            ),
        )
    )


def _comparison(config: CurationConfig) -> pl.Expr:
    compares = strategy_of(config.strategy).compares
    behind = []
    if "length" in compares:
        behind.append((LENGTH.min().over("task_id") < LENGTH, WhyNot.LONGER))
    if "speed" in compares:
        behind.append((SPEEDUP == 0, WhyNot.UNTIMED))
        behind.append((~is_fastest(config.equal_speedups), WhyNot.SLOWER))
    return pl.coalesce(
        *(pl.when(condition).then(pl.lit(why.value)) for condition, why in behind),
        pl.lit(WhyNot.OUTRANKED.value),
    )
