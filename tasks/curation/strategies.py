"""Which verified samples become training data: ConCuR's rule (arXiv 2510.07356, data curation) and
what it is compared with, by name.

The paper took 4,892 samples: (a) 3,934 concise and fast, (b) 414 with a speedup above 5, (c) 544 of
single operators.

Guarantees: all strategies take from the same pool (`pool.eligible_samples`), each sample once, in
an order that depends on the data and the seed alone, whatever the order of the rows. concur itself
draws nothing; the seed matters to it only where a size thins it. A control has as many samples as
concur under each criterion, where there are enough (concur_two_correct has fewer by (a)); no kernel
of a task that is known to equal another (the frame's `kernel`) is taken beside it. Does not
guarantee that a size is reached, nor that single operators and fusions end up equal: (c) adds at
most one sample a task and only ever adds single operators.

docs/explanation/curation.md says what each strategy controls for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import polars as pl

from kernels_eval.errors import UsageError
from tasks.curation.config import CurationConfig
from tasks.curation.criteria import (
    LENGTH,
    SHORTEST_THEN_FASTEST,
    SPEEDUP,
    Order,
    balanced,
    best_per_task,
    concise_and_fast,
    high_speedup,
    ranked,
    single_operator,
    without,
)
from tasks.curation.pool import CUT_OFF, Array, drawn, eligible_samples, ends

# What the column `criterion` says.
CONCISE_AND_FAST, HIGH_SPEEDUP = "concise_and_fast", "high_speedup"
SINGLE_OPERATOR, ANY_OPERATOR = "single_operator", "any_operator"
FASTEST, SHORTEST, LONGEST, DRAWN = "fastest", "shortest", "longest", "drawn"


def curate(frame: pl.DataFrame, config: CurationConfig) -> pl.DataFrame:
    """The rows taken, in the order of the rule, with a column `criterion` naming what took each.

    Returns the columns of `frame` plus `criterion`; no rows where nothing qualifies.
    shuffled_reasoning adds `reasoning_from`, the candidate whose `reasoning` and `reasoning_tokens`
    a row holds. Raises UsageError as `eligible_samples` does, and where more than half of the
    samples to shuffle are of one task.
    """
    taken = select(eligible_samples(frame, config), config)
    if config.cut_off_answers:  # what training reads, however it is known
        cut = pl.when(ends(frame).is_in(CUT_OFF)).then(pl.lit("length"))
        frame = frame.with_columns(finish_reason=cut)
    rows = frame[taken["_row"]].with_columns(taken["criterion"])
    if config.strategy != "shuffled_reasoning":
        return rows
    givers = rows[donors(taken)]
    moved = [givers[name] for name in ("reasoning", "reasoning_tokens") if name in rows.columns]
    return rows.with_columns(*moved, reasoning_from=givers["candidate_id"].cast(pl.String))


def select(pool: pl.DataFrame, config: CurationConfig) -> pl.DataFrame:
    """The rows of a pool that the configured strategy takes, with `criterion` and `_draw`, in the
    order of its rule."""
    pool = drawn(pool, config.seed)
    if baseline := BASELINES.get(config.strategy):
        return _baseline(pool, config, baseline)
    return thinned(RULES[config.strategy](pool, config), config.size)


# -- the paper's rule and its controls -------------------------------------------------------------


def concur(pool: pl.DataFrame, config: CurationConfig, least: int = 1) -> pl.DataFrame:
    """All of (a), then (b), then (c), or as many as `criterion_sizes` says: a sample is labelled
    with the first that took it. (a) looks at tasks with `least` correct samples."""
    # (a) is decided among all correct samples: a strict demand may refuse the winner, never crown
    # another
    winners = concise_and_fast(pool, config.equal_speedups)
    winners = winners.filter("_sure", pl.col("_rivals") >= least)
    sure, sizes = pool.filter("_sure"), config.criterion_sizes
    taken = _named(_draw(winners, sizes[0]) if sizes else winners, CONCISE_AND_FAST)
    fast = without(high_speedup(sure, config.min_speedup), taken)
    taken = _added(taken, _draw(fast, sizes[1]) if sizes else fast, HIGH_SPEEDUP)
    if sizes:
        singles = best_per_task(sure.filter("_single"), taken, SHORTEST_THEN_FASTEST)
        return _added(taken, singles.head(sizes[2]), SINGLE_OPERATOR)
    singles = single_operator(sure, taken, config.single_operator_quota)
    return _added(taken, singles, SINGLE_OPERATOR)


def concur_two_correct(pool: pl.DataFrame, config: CurationConfig) -> pl.DataFrame:
    """concur whose (a) leaves out tasks with one correct sample, which is the shortest and the
    fastest whatever it is like."""
    return concur(pool, config, least=2)


def concur_without_conciseness(pool: pl.DataFrame, config: CurationConfig) -> pl.DataFrame:
    """Lengths are not looked at: (b); then the fastest sample of tasks that are drawn, as many as
    concur takes by (a) alone; then (c) with the fastest samples of single-operator tasks, as many
    as concur adds."""
    like, sure = concur(pool, config), pool.filter("_sure")
    chosen = like.filter(pl.col("criterion") != SINGLE_OPERATOR).select("_kernel")
    fast = high_speedup(sure, config.min_speedup)
    fast = fast.join(chosen, on="_kernel", how="semi", maintain_order="left")
    fast = _named(fast, HIGH_SPEEDUP)
    alone = without(like.filter(criterion=CONCISE_AND_FAST), fast).height
    timed = pool.filter(SPEEDUP > 0)
    winners = best_per_task(timed, pool.clear(), [-SPEEDUP]).filter("_sure")
    taken = _added(fast, _draw(without(winners, fast), alone), FASTEST)
    more = best_per_task(timed.filter("_sure", "_single"), taken, [-SPEEDUP])
    return _added(taken, more.head(_count(like, SINGLE_OPERATOR)), SINGLE_OPERATOR)


def concur_without_speedup(pool: pl.DataFrame, config: CurationConfig) -> pl.DataFrame:
    """Speedups are not looked at: the shortest sample of tasks that are drawn, as many as concur
    takes by (a) and (b); then (c), ties in length going to the lower sample_index."""
    like = concur(pool, config)
    singles = _count(like, SINGLE_OPERATOR)
    winners = best_per_task(pool, pool.clear(), [LENGTH]).filter("_sure")
    taken = _named(_draw(winners, like.height - singles), SHORTEST)
    more = best_per_task(pool.filter("_sure", "_single"), taken, [LENGTH])
    return _added(taken, more.head(singles), SINGLE_OPERATOR)


def concur_without_balance(pool: pl.DataFrame, config: CurationConfig) -> pl.DataFrame:
    """(a) and (b); then, as many as concur adds by (c), the same without asking for single
    operators: the shortest sample not yet taken of tasks of any kind, which are drawn."""
    like = concur(pool, config)
    taken = like.filter(pl.col("criterion") != SINGLE_OPERATOR)
    left = best_per_task(pool.filter("_sure"), taken, SHORTEST_THEN_FASTEST)
    return _added(taken, _draw(left, _count(like, SINGLE_OPERATOR)), ANY_OPERATOR)


RULES: dict[str, Callable[[pl.DataFrame, CurationConfig], pl.DataFrame]] = {
    "concur": concur,
    "concur_without_conciseness": concur_without_conciseness,
    "concur_without_speedup": concur_without_speedup,
    "concur_without_balance": concur_without_balance,
    "concur_two_correct": concur_two_correct,
    "shuffled_reasoning": concur,
}


def thinned(taken: pl.DataFrame, size: int | None) -> pl.DataFrame:
    """At most `size` of the samples, each criterion keeping its share to within one sample; a
    smaller set is part of a larger one.

    Within a criterion samples are drawn. Keeps the order of the rule.
    """
    if size is None or size >= taken.height:
        return taken
    rank = pl.struct("_draw", "candidate_id").rank("ordinal").over("criterion")
    place = (rank - 0.5) / pl.len().over("criterion")
    kept = taken.with_row_index("_order").with_columns(_place=place)
    return kept.sort("_place", "_order").head(size).sort("_order").drop("_order", "_place")


# -- baselines -------------------------------------------------------------------------------------


class Baseline(NamedTuple):
    """A strategy of one criterion: the order in which it takes, whether it balances, and what it
    calls its criterion."""

    order: Order
    balances: bool
    criterion: str


BASELINES: dict[str, Baseline] = {
    "min_length": Baseline("min_length", False, SHORTEST),
    "max_length": Baseline("max_length", False, LONGEST),
    "speedup": Baseline("speedup", False, FASTEST),
    "random": Baseline("random", False, DRAWN),
    "balanced_min_length": Baseline("min_length", True, SHORTEST),
    "balanced_speedup": Baseline("speedup", True, FASTEST),
    "balanced_random": Baseline("random", True, DRAWN),
}


def _baseline(pool: pl.DataFrame, config: CurationConfig, baseline: Baseline) -> pl.DataFrame:
    size = baseline_size(pool, config)
    rows = ranked(pool.filter("_sure"), baseline.order, config.max_per_task)
    if baseline.balances:
        rows = balanced(rows, size, config.single_operator_quota)
    return _named(rows.head(size), baseline.criterion)


def baseline_size(pool: pl.DataFrame, config: CurationConfig) -> int:
    """The size asked for, or that of concur's own set of the same pool. The pool needs `_draw`."""
    return concur(pool, config).height if config.size is None else config.size


# -- reasoning moved between tasks -----------------------------------------------------------------


def donors(taken: pl.DataFrame) -> Array:
    """For each sample the place of the one whose reasoning it gets: a permutation under which no
    sample gets one of its own task.

    Tasks are put in a drawn order, each task's samples next to each other, and every reasoning
    moves on by as many places as the largest task has samples. Raises UsageError where more than
    half of the samples are of one task: then there is no such permutation.
    """
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


# -- building a set --------------------------------------------------------------------------------


def _named(rows: pl.DataFrame, criterion: str) -> pl.DataFrame:
    return rows.with_columns(criterion=pl.lit(criterion))


def _added(taken: pl.DataFrame, more: pl.DataFrame, criterion: str) -> pl.DataFrame:
    """`taken`, then what is new in `more`."""
    return pl.concat([taken, _named(without(more, taken), criterion)])


def _draw(rows: pl.DataFrame, count: int) -> pl.DataFrame:
    """`count` rows that are drawn, in the order of `rows`."""
    ordered = rows.with_row_index("_order").sort("_draw", "candidate_id").head(count)
    return ordered.sort("_order").drop("_order")


def _count(taken: pl.DataFrame, criterion: str) -> int:
    return taken.filter(criterion=criterion).height
