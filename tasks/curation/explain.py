"""Why a candidate is in a training set, or why it is not, in words with the numbers that decided.

Guarantees: the answer is that of `strategies.select` on the same rows, which is asked, never
guessed; the reasons come in the order in which the rule looks. Does not guarantee that one changed
number would have brought the candidate in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from kernels_eval.errors import UsageError
from tasks.curation.config import CurationConfig
from tasks.curation.criteria import is_fastest, ranked
from tasks.curation.pool import drawn, eligible_samples
from tasks.curation.strategies import (
    ANY_OPERATOR,
    BASELINES,
    CONCISE_AND_FAST,
    FASTEST,
    HIGH_SPEEDUP,
    RULES,
    SHORTEST,
    SINGLE_OPERATOR,
    baseline_size,
    donors,
    select,
)

if TYPE_CHECKING:
    import polars as pl

CHECKS: dict[str, tuple[str, ...]] = {  # the criteria of each rule, in the order in which it looks
    "concur": (CONCISE_AND_FAST, HIGH_SPEEDUP, SINGLE_OPERATOR),
    "shuffled_reasoning": (CONCISE_AND_FAST, HIGH_SPEEDUP, SINGLE_OPERATOR),
    "concur_without_balance": (CONCISE_AND_FAST, HIGH_SPEEDUP, ANY_OPERATOR),
    "concur_without_conciseness": (HIGH_SPEEDUP, FASTEST, SINGLE_OPERATOR),
    "concur_without_speedup": (SHORTEST, SINGLE_OPERATOR),
}


class Explanation(BaseModel):
    """One candidate under one strategy. `criterion` is None where it was not taken."""

    model_config = ConfigDict(frozen=True)

    candidate_id: str
    task_id: str
    strategy: str
    taken: bool
    criterion: str | None
    reasons: tuple[str, ...]


def explain(frame: pl.DataFrame, config: CurationConfig, candidate_id: str) -> Explanation:
    """What `curate` with the same frame and configuration does with a candidate, and why.

    Raises UsageError where the frame does not have the candidate, and as `curate` does.
    """
    import polars as pl

    found = frame.filter(pl.col("candidate_id") == candidate_id).head(1)
    if found.is_empty():
        raise UsageError(
            f"there is no candidate {candidate_id!r} among {frame.height} rows",
            "give a candidate_id of the verdicts",
        )
    row = found.row(0, named=True)
    pool = drawn(eligible_samples(frame, config), config.seed)

    def said(reasons: list[str], criterion: str | None = None) -> Explanation:
        names = {
            "candidate_id": candidate_id,
            "task_id": row["task_id"],
            "strategy": config.strategy,
        }
        return Explanation(
            **names, taken=criterion is not None, criterion=criterion, reasons=tuple(reasons)
        )

    if refusal := _not_eligible(row, config):
        return said([refusal])
    me = pool.filter(pl.col("candidate_id") == candidate_id).row(0, named=True)
    rivals = pool.filter(pl.col("task_id") == row["task_id"])
    taken = select(pool, config)
    mine = taken.filter(pl.col("candidate_id") == candidate_id)
    criterion = None if mine.is_empty() else mine["criterion"][0]
    reasons = [] if me["_sure"] else _demands(me, config)
    if config.strategy in BASELINES:
        return said(reasons + (_of_baseline(me, pool, config) if me["_sure"] else []), criterion)
    whole = RULES[config.strategy](pool, config)
    own = whole.filter(pl.col("candidate_id") == candidate_id)
    took = None if own.is_empty() else own["criterion"][0]
    for name in CHECKS[config.strategy]:
        reasons.append(f"{name}: {_of_criterion(name, me, rivals, whole, config, took)}")
        if name == took:
            break
    if took and not criterion:
        reasons.append(
            f"size {config.size} keeps {taken.height} of the {whole.height} samples of the rule,"
            f" drawn with seed {config.seed}"
        )
    if criterion and config.strategy == "shuffled_reasoning":
        place = taken["candidate_id"].to_list().index(candidate_id)
        reasons.append(
            f"its row holds the reasoning of {taken['candidate_id'][int(donors(taken)[place])]}"
        )
    return said(reasons, criterion)


def _not_eligible(row: dict[str, Any], config: CurationConfig) -> str | None:
    """Why a row is not in the pool."""
    if row["status"] != "correct":
        return (
            f"status {row['status']}{'/' + row['reason'] if row.get('reason') else ''}: only"
            " correct samples are taken"
        )
    if not config.later_turns and (row.get("turn") or 1) > 1:
        return (
            f"it answers a follow-up (turn {row['turn']}), not its task's first prompt: later_turns"
            " is off"
        )
    if raised := [name for name in config.exclude_flags if name in row["trace_flags"]]:
        return f"left out: trace flag {', '.join(raised)} (exclude_flags)"
    if row["reasoning_tokens"] <= 0:
        return "it has no reasoning to train on"
    return None


def _demands(me: dict[str, Any], config: CurationConfig) -> list[str]:
    """The strict demands that a sample does not meet."""
    lines, bound = [], config.require_speedup_lower_above
    if bound is not None and not me["_speedup_lower"] > bound:
        lines.append(
            f"the lower bound of its speedup, {me['_speedup_lower']:.4g}, is not above {bound:g}"
            " (require_speedup_lower_above)"
        )
    elif config.require_custom_kernel:
        lines.append("its verdict names no custom kernel (require_custom_kernel)")
    return lines


def _of_criterion(
    name: str,
    me: dict[str, Any],
    rivals: pl.DataFrame,
    whole: pl.DataFrame,
    config: CurationConfig,
    took: str | None,
) -> str:
    if name == HIGH_SPEEDUP:
        if not me["_speedup"]:
            return "it was not timed"
        return (
            f"speedup {me['_speedup']:.4g} is"
            f" {'' if me['_speedup'] > config.min_speedup else 'not '}above {config.min_speedup:g}"
        )
    if name == CONCISE_AND_FAST:
        parts = [_length(me, rivals), _speed(me, rivals, config.equal_speedups)]
        return "; ".join(parts + _of_ties(name, me, rivals, whole))
    if name == FASTEST:
        return "; ".join(
            [_speed(me, rivals, "exact"), *_of_draw(me, rivals, whole, name, config, took)]
        )
    if name == SHORTEST:
        return "; ".join([_length(me, rivals), *_of_draw(me, rivals, whole, name, config, took)])
    if name == SINGLE_OPERATOR and not me["_single"]:
        return "its task is a fusion, not a single operator"
    if name == took:
        return (
            "it comes first among the samples of its task that were not yet taken, and its task's"
            " turn came before the quota was met"
        )
    return _of_turn(name, me, rivals, whole)


def _length(me: dict[str, Any], rivals: pl.DataFrame) -> str:
    import polars as pl

    shortest = rivals.sort("reasoning_tokens", "sample_index", "candidate_id").row(0, named=True)
    if shortest["reasoning_tokens"] < me["reasoning_tokens"]:
        other = (
            f"the shortest correct of its task has {shortest['reasoning_tokens']:,}"
            f" ({shortest['candidate_id']})"
        )
        return f"reasoning {me['reasoning_tokens']:,} tokens; {other}"
    equal = rivals.filter(pl.col("reasoning_tokens") == me["reasoning_tokens"]).height
    others = "" if equal == 1 else f", as are {equal - 1} others"
    return (
        f"reasoning {me['reasoning_tokens']:,} tokens, the shortest of its task's {rivals.height}"
        f" correct{others}"
    )


def _speed(me: dict[str, Any], rivals: pl.DataFrame, equal: Any) -> str:
    import polars as pl

    if not me["_speedup"]:
        return "it was not timed"
    fastest = rivals.sort(-pl.col("_speedup"), "sample_index", "candidate_id").row(0, named=True)
    alike = me["candidate_id"] in rivals.filter(is_fastest(equal))["candidate_id"]
    if me["_speedup"] == fastest["_speedup"]:
        return f"speedup {me['_speedup']:.4g}, the fastest of its task's {rivals.height} correct"
    other = f"the fastest of its task has {fastest['_speedup']:.4g} ({fastest['candidate_id']})"
    if equal == "interval":
        other += f"; their 95 % intervals {'overlap' if alike else 'do not overlap'}"
    return f"speedup {me['_speedup']:.4g}; {other}"


def _of_ties(name: str, me: dict[str, Any], rivals: pl.DataFrame, whole: pl.DataFrame) -> list[str]:
    """Who was taken in its place: a sample of the same task that is as good, and has the lower
    sample_index."""
    import polars as pl

    winner = whole.filter(pl.col("criterion") == name, pl.col("task_id") == me["task_id"])
    if winner.is_empty() or winner["candidate_id"][0] == me["candidate_id"]:
        return []
    return [
        f"{winner['candidate_id'][0]} (sample {winner['sample_index'][0]}) of its task was taken"
    ]


def _of_draw(
    me: dict[str, Any],
    rivals: pl.DataFrame,
    whole: pl.DataFrame,
    name: str,
    config: CurationConfig,
    took: str | None,
) -> list[str]:
    import polars as pl

    if took == name:
        return [f"its task was drawn (seed {config.seed})"]
    if others := _of_ties(name, me, rivals, whole):
        return others
    count = whole.filter(pl.col("criterion") == name).height
    return [f"its task is not among the {count:,} that were drawn (seed {config.seed})"]


def _of_turn(name: str, me: dict[str, Any], rivals: pl.DataFrame, whole: pl.DataFrame) -> str:
    """Not taken by the last criterion, one sample a task: somebody of its task came first, or the
    turn did not come."""
    if others := _of_ties(name, me, rivals, whole):
        return others[0]
    import polars as pl

    count = whole.filter(pl.col("criterion") == name).height
    ending = "as many as concur adds" if name == ANY_OPERATOR else "then the quota was met"
    return f"{count:,} were added and {ending}; none of them is of its task"


def _of_baseline(me: dict[str, Any], pool: pl.DataFrame, config: CurationConfig) -> list[str]:
    """Its place within its task, then in the whole order."""
    import polars as pl

    order, balances, _ = BASELINES[config.strategy]
    sure = pool.filter(pl.col("_sure"))
    mine = ranked(sure.filter(pl.col("task_id") == me["task_id"]), order, None)[
        "candidate_id"
    ].to_list()
    if me["candidate_id"] not in mine:
        return ["it was not timed"]
    length = f"reasoning {me['reasoning_tokens']:,} tokens"
    value = {
        "speedup": f"speedup {me['_speedup']:.4g}",
        "random": f"drawn with seed {config.seed}",
    }.get(order, length)
    lines = [
        f"{value}: number {mine.index(me['candidate_id']) + 1} of its task's {len(mine)} in the"
        " order of the rule"
    ]
    line = ranked(sure, order, config.max_per_task)
    if balances:
        line = line.filter(pl.col("_single") == me["_single"])
    places = line["candidate_id"].to_list()
    if me["candidate_id"] not in places:
        first = ", ".join(mine[: config.max_per_task])
        return [*lines, f"at most {config.max_per_task} of a task: {first} came first"]
    kind = ("single operators" if me["_single"] else "fusions") if balances else "samples"
    of = f"number {places.index(me['candidate_id']) + 1:,} of {len(places):,} {kind} in that order"
    count = (
        select(pool, config)
        .filter(pl.col("_single") == me["_single"] if balances else pl.lit(True))
        .height
    )
    return [*lines, f"{of}; the set of {baseline_size(pool, config):,} takes {count:,} of them"]
