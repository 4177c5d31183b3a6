"""Which verified samples become training data: ConCuR's rule (arXiv 2510.07356, data curation) and
what it is compared with, by name.

The paper took 4,892 samples: (a) 3,934 concise and fast, (b) 414 with a speedup above 5, (c) 544 of
single operators.

Guarantees: all strategies take from the same pool (`tasks.curation.pool`), each sample once, in an
order that depends on the data and the seed alone, whatever the order of the rows. concur itself
draws nothing; the seed matters to it only where a size thins it. A control has as many samples as
concur under each criterion, where there are enough (concur_two_correct has fewer by (a)); no kernel
of a task that is known to equal another (the frame's `kernel`) is taken beside it. Does not
guarantee that a size is reached, nor that single operators and fusions end up equal: (c) adds at
most one sample a task and only ever adds single operators.

docs/explanation/curation.md says what each strategy controls for.
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
FASTEST, SHORTEST, LONGEST, DRAWN = "fastest", "shortest", "longest", "drawn"


class Strategy(NamedTuple):
    """A rule, and what a reader of its decisions must know.

    `choose` adds samples to an empty choice. `compares` says what it compares within a task: a
    sample that is longer or slower than another of its task is told so. With `moves_reasoning`
    every sample gets the reasoning of another task's.
    """

    choose: Callable[[Choice, CurationConfig], None]
    compares: tuple[Literal["length", "speed"], ...] = ()
    moves_reasoning: bool = False


def choose(pool: pl.DataFrame, config: CurationConfig) -> Choice:
    """What the configured strategy takes of a pool (`tasks.curation.pool.pool_of`). Raises
    UsageError for a strategy that cannot be loaded."""
    choice = Choice(with_draw(pool, config.seed))
    strategy_of(config.strategy).choose(choice, config)
    choice.thin(config.size)
    return choice


def strategy_of(name: str) -> Strategy:
    """A strategy of `STRATEGIES` or of an installed package (entry points `concur.strategies`).

    Raises UsageError where there is none, or it is no `Strategy`.
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    return load_extension(STRATEGY_GROUP, name, Strategy, STRATEGIES)


# -- the paper's rule and its controls -------------------------------------------------------------


def concur(choice: Choice, config: CurationConfig, least: int = 1) -> None:
    """All of (a), then (b), then (c), or as many as `criterion_sizes` says: a sample is labelled
    with the first that took it. (a) looks at tasks with `least` correct samples."""
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


def concur_without_conciseness(choice: Choice, config: CurationConfig) -> None:
    """Lengths are not looked at: (b); then the fastest sample of tasks that are drawn, as many as
    concur takes by (a) alone; then (c) with the fastest samples of single-operator tasks, as many
    as concur adds."""
    like = _concur_of(choice.pool, config)
    chosen = like.taken.filter(pl.col("criterion") != SINGLE_OPERATOR).select("_kernel")
    fast = high_speedup(choice.sure, config.min_speedup)
    kept = fast.join(chosen, on="_kernel", how="semi", maintain_order="left")
    choice.add(HIGH_SPEEDUP, fast, kept)
    alone = choice.left(like.taken.filter(criterion=CONCISE_AND_FAST)).height
    timed = choice.pool.filter(SPEEDUP > 0)
    winners = best_per_task(timed, choice.pool.clear(), [-SPEEDUP])
    winners = choice.left(winners.filter(pl.col("_unmet").is_null()))
    choice.add(FASTEST, winners, draw(winners, alone))
    timed_singles = choice.sure.filter(SPEEDUP > 0, pl.col("_single"))
    more = best_per_task(timed_singles, choice.taken, [-SPEEDUP])
    choice.add(SINGLE_OPERATOR, more, more.head(like.count(SINGLE_OPERATOR)))


def concur_without_speedup(choice: Choice, config: CurationConfig) -> None:
    """Speedups are not looked at: the shortest sample of tasks that are drawn, as many as concur
    takes by (a) and (b); then (c), ties in length going to the lower sample_index."""
    like = _concur_of(choice.pool, config)
    singles = like.count(SINGLE_OPERATOR)
    winners = best_per_task(choice.pool, choice.pool.clear(), [LENGTH])
    winners = winners.filter(pl.col("_unmet").is_null())
    choice.add(SHORTEST, winners, draw(winners, like.taken.height - singles))
    more = best_per_task(choice.sure.filter("_single"), choice.taken, [LENGTH])
    choice.add(SINGLE_OPERATOR, more, more.head(singles))


def concur_without_balance(choice: Choice, config: CurationConfig) -> None:
    """(a) and (b); then, as many as concur adds by (c), the same without asking for single
    operators: the shortest sample not yet taken of tasks of any kind, which are drawn."""
    like = _concur_of(choice.pool, config)
    for criterion in (CONCISE_AND_FAST, HIGH_SPEEDUP):
        choice.add(criterion, like.taken.filter(criterion=criterion).drop("criterion"))
    rest = best_per_task(choice.sure, choice.taken, SHORTEST_THEN_FASTEST)
    choice.add(ANY_OPERATOR, rest, draw(rest, like.count(SINGLE_OPERATOR)))


def _concur_of(pool: pl.DataFrame, config: CurationConfig) -> Choice:
    """What concur takes of the same pool, whatever the size asked for."""
    choice = Choice(pool)
    concur(choice, config)
    return choice


# -- baselines -------------------------------------------------------------------------------------


def _baseline(
    choice: Choice, config: CurationConfig, order: Order, criterion: str, balances: bool = False
) -> None:
    """One criterion: the first samples of each task in an order. The size is the one asked for, or
    that of concur's own set."""
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
