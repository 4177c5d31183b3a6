"""Strategies: ConCuR's rule (arXiv 2510.07356, data curation) and its controls
(docs/explanation/curation.md).

Guarantees: all use one pool, and take each sample and known equal kernel once, in an order of data
and seed alone. Controls match concur's size by criterion where possible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple

import polars as pl

from kernels_eval.extensions import load_extension
from tasks.curation.choice import Choice, at_most
from tasks.curation.config import STRATEGY_GROUP, CurationConfig
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
    single_operators_wanted,
)
from tasks.curation.draw import draw, with_draw
from tasks.curation.reasons import WhyNot

# What the column `criterion` says.
CONCISE_AND_FAST, HIGH_SPEEDUP = "concise_and_fast", "high_speedup"
SINGLE_OPERATOR, ANY_OPERATOR = "single_operator", "any_operator"
SHORTEST_INSTEAD = "shortest_instead"
FASTEST, SHORTEST, LONGEST, DRAWN = "fastest", "shortest", "longest", "drawn"


class Strategy(NamedTuple):
    """A rule, and how its decisions read. `choose` adds samples to an empty choice; `compares` says
    whether samples lose by length or speed; `moves_reasoning` gives every sample another task's
    reasoning."""

    choose: Callable[[Choice, CurationConfig], None]
    compares: tuple[Literal["length", "speed"], ...] = ()
    moves_reasoning: bool = False


def choose(pool: pl.DataFrame, config: CurationConfig) -> Choice:
    """The configured strategy's choice from a pool (`tasks.curation.pool.pool_of`). Raises
    UsageError for a strategy that cannot be loaded."""
    choice = Choice(with_draw(pool, config.seed))
    strategy_of(config.strategy).choose(choice, config)
    choice.thin(config.size)
    return choice


def strategy_of(name: str) -> Strategy:
    """A strategy of `STRATEGIES` or an installed package (entry points `concur.strategies`).

    Raises UsageError where it is missing or no `Strategy`.
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    return load_extension(STRATEGY_GROUP, name, Strategy, STRATEGIES)


# -- the paper's rule and its controls -------------------------------------------------------------


def concur(choice: Choice, config: CurationConfig, least: int = 1) -> None:
    """Take (a), (b), then (c), all or up to `criterion_sizes`; the first criterion labels a sample.
    (a) needs `least` correct samples in a task. Where these take none, `if_empty` decides."""
    sizes = config.criterion_sizes or (None, None, None)
    # (a) is decided among all correct samples: a strict demand may refuse the winner, never crown
    # another
    winners = concise_and_fast(choice.pool, config.equal_speedups)
    alone = pl.col("_rivals") < least
    choice.pass_over(CONCISE_AND_FAST, winners.filter(alone), WhyNot.ONE_CORRECT)
    winners = winners.filter(~alone, pl.col("_unmet").is_null())
    choice.add(CONCISE_AND_FAST, winners, at_most(winners, sizes[0]))
    fast = choice.left(high_speedup(choice.sure, config.min_speedup))
    choice.add(HIGH_SPEEDUP, fast, at_most(fast, sizes[1]))
    singles = best_per_task(choice.sure.filter("_single"), choice.taken, SHORTEST_THEN_FASTEST)
    wanted = sizes[2]
    if wanted is None:
        wanted = single_operators_wanted(choice.taken, config.single_operator_quota)
    choice.add(SINGLE_OPERATOR, singles, singles.head(wanted))
    if choice.taken.is_empty() and config.if_empty == "shortest":
        rivals = choice.sure.filter(~alone, SPEEDUP > 0)
        choice.add(SHORTEST_INSTEAD, best_per_task(rivals, choice.taken, SHORTEST_THEN_FASTEST))


def concur_without_conciseness(choice: Choice, config: CurationConfig) -> None:
    """(b), the fastest samples of as many drawn tasks as concur takes by (a) alone, then (c) with
    the fastest samples."""
    like = _concur_of(choice.pool, config)
    chosen = like.taken.filter(pl.col("criterion") != SINGLE_OPERATOR).select("_kernel")
    fast = high_speedup(choice.sure, config.min_speedup)
    kept = fast.join(chosen, on="_kernel", how="semi", maintain_order="left")
    choice.add(HIGH_SPEEDUP, fast, kept)
    by_length = pl.col("criterion").is_in([CONCISE_AND_FAST, SHORTEST_INSTEAD])
    alone = choice.left(like.taken.filter(by_length)).height
    timed = choice.pool.filter(SPEEDUP > 0)
    winners = best_per_task(timed, choice.pool.clear(), [-SPEEDUP])
    winners = choice.left(winners.filter(pl.col("_unmet").is_null()))
    choice.add(FASTEST, winners, draw(winners, alone))
    timed_singles = choice.sure.filter(SPEEDUP > 0, pl.col("_single"))
    more = best_per_task(timed_singles, choice.taken, [-SPEEDUP])
    choice.add(SINGLE_OPERATOR, more, more.head(like.count(SINGLE_OPERATOR)))


def concur_without_speedup(choice: Choice, config: CurationConfig) -> None:
    """Ignore speedups: the shortest samples of as many drawn tasks as concur takes by (a) and (b),
    then (c) with ties by sample_index."""
    like = _concur_of(choice.pool, config)
    singles = like.count(SINGLE_OPERATOR)
    winners = best_per_task(choice.pool, choice.pool.clear(), [LENGTH])
    winners = winners.filter(pl.col("_unmet").is_null())
    choice.add(SHORTEST, winners, draw(winners, like.taken.height - singles))
    more = best_per_task(choice.sure.filter("_single"), choice.taken, [LENGTH])
    choice.add(SINGLE_OPERATOR, more, more.head(singles))


def concur_without_balance(choice: Choice, config: CurationConfig) -> None:
    """(a) and (b), then as many as concur's (c) from drawn tasks of any kind: their shortest
    samples not yet taken."""
    like = _concur_of(choice.pool, config)
    for criterion in (CONCISE_AND_FAST, HIGH_SPEEDUP, SHORTEST_INSTEAD):
        choice.add(criterion, like.taken.filter(criterion=criterion).drop("criterion"))
    rest = best_per_task(choice.sure, choice.taken, SHORTEST_THEN_FASTEST)
    choice.add(ANY_OPERATOR, rest, draw(rest, like.count(SINGLE_OPERATOR)))


def _concur_of(pool: pl.DataFrame, config: CurationConfig) -> Choice:
    choice = Choice(pool)
    concur(choice, config)
    return choice


# -- baselines -------------------------------------------------------------------------------------


def _baseline(
    choice: Choice, config: CurationConfig, order: Order, criterion: str, balances: bool = False
) -> None:
    size = config.size or _concur_of(choice.pool, config).taken.height
    offered = ranked(choice.sure, order, config.max_per_task)
    kept = balanced(offered, size, config.single_operator_quota) if balances else offered
    choice.add(criterion, offered, kept.head(size))


_min_length = partial(_baseline, order="min_length", criterion=SHORTEST)
_max_length = partial(_baseline, order="max_length", criterion=LONGEST)
_speedup = partial(_baseline, order="speedup", criterion=FASTEST)
_random = partial(_baseline, order="random", criterion=DRAWN)

STRATEGIES: Mapping[str, Strategy] = {
    "concur": Strategy(concur, ("length", "speed")),
    "concur_without_conciseness": Strategy(concur_without_conciseness, ("speed",)),
    "concur_without_speedup": Strategy(concur_without_speedup, ("length",)),
    "concur_without_balance": Strategy(concur_without_balance, ("length", "speed")),
    # concur whose (a) leaves out tasks with one correct sample, which is the shortest and the
    # fastest whatever it is like
    "concur_two_correct": Strategy(partial(concur, least=2), ("length", "speed")),
    "shuffled_reasoning": Strategy(concur, ("length", "speed"), moves_reasoning=True),
    "min_length": Strategy(_min_length, ("length",)),
    "max_length": Strategy(_max_length),
    "speedup": Strategy(_speedup, ("speed",)),
    "random": Strategy(_random),
    "balanced_min_length": Strategy(partial(_min_length, balances=True), ("length",)),
    "balanced_speedup": Strategy(partial(_speedup, balances=True), ("speed",)),
    "balanced_random": Strategy(partial(_random, balances=True)),
}
