"""Why a candidate is in a training set, or why it is not, with the numbers that decided.

Guarantees: the answer is that of `strategies.select` on the same rows, which is asked, never
guessed; the reasons come in the order in which the rule looks, one a criterion. Does not guarantee
that one changed number would have brought the candidate in.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.records import Json, Record, Status
from tasks.curation.config import CurationConfig
from tasks.curation.criteria import is_fastest, ranked
from tasks.curation.pool import CUT_OFF, drawn, eligible_samples, ends
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

CONCUR = (CONCISE_AND_FAST, HIGH_SPEEDUP, SINGLE_OPERATOR)
CHECKS: dict[str, tuple[str, ...]] = {  # the criteria of each rule, in the order in which it looks
    "concur": CONCUR,
    "shuffled_reasoning": CONCUR,
    "concur_two_correct": CONCUR,
    "concur_without_balance": (CONCISE_AND_FAST, HIGH_SPEEDUP, ANY_OPERATOR),
    "concur_without_conciseness": (HIGH_SPEEDUP, FASTEST, SINGLE_OPERATOR),
    "concur_without_speedup": (SHORTEST, SINGLE_OPERATOR),
}


class Explanation(Record):
    """One candidate under one strategy. `criterion` is None where it was not taken."""

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
    found = frame.filter(candidate_id=candidate_id)
    if found.is_empty():
        raise UsageError(
            f"there is no candidate {candidate_id!r} among {frame.height} rows",
            "give a candidate_id of the verdicts",
        )
    row = found.row(0, named=True)
    row["_ends"] = ends(frame).filter(frame["candidate_id"] == candidate_id)[0]
    pool = drawn(eligible_samples(frame, config), config.seed)
    criterion = None
    if refusal := _not_eligible(row, config):
        reasons = [refusal]
    else:
        case = _Case(pool, config, candidate_id)
        reasons, criterion = list(case.reasons()), case.criterion
    return Explanation(
        candidate_id=candidate_id,
        task_id=row["task_id"],
        strategy=config.strategy,
        taken=criterion is not None,
        criterion=criterion,
        reasons=tuple(reasons),
    )


def _not_eligible(row: Json, config: CurationConfig) -> str | None:
    """Why a row is not in the pool."""
    if row["status"] != Status.CORRECT:
        reason = f"/{row['reason']}" if row.get("reason") else ""
        return f"status {row['status']}{reason}: only correct samples are taken"
    if not config.later_turns and (row.get("turn") or 1) > 1:
        asked = f"it answers a follow-up (turn {row['turn']}), not its task's first prompt"
        return f"{asked}: later_turns is off"
    if not config.cut_off_answers and row["_ends"] in CUT_OFF:
        return f"its answer is {row['_ends']}: cut_off_answers is off"
    if raised := [name for name in config.exclude_flags if name in row["trace_flags"]]:
        return f"left out: trace flag {', '.join(raised)} (exclude_flags)"
    return None if row["reasoning_tokens"] > 0 else "it has no reasoning to train on"


def _criterion_of(rows: pl.DataFrame, candidate_id: str) -> str | None:
    found = rows.filter(candidate_id=candidate_id)["criterion"]
    return None if found.is_empty() else str(found[0])


class _Case:
    """One candidate of the pool, the correct samples of its task, and what the rule takes."""

    def __init__(self, pool: pl.DataFrame, config: CurationConfig, candidate_id: str) -> None:
        self.pool, self.config, self.id = pool, config, candidate_id
        self.me = pool.filter(candidate_id=candidate_id).row(0, named=True)
        self.rivals = pool.filter(task_id=self.me["task_id"])
        self.whole = self.taken = select(pool, config)
        if config.strategy in RULES and config.size is not None:
            self.whole = RULES[config.strategy](pool, config)
        self.criterion = _criterion_of(self.taken, candidate_id)

    def reasons(self) -> Iterator[str]:
        """One reason a criterion that was looked at."""
        config = self.config
        if not self.me["_sure"]:
            yield self._unmet_demand()
        if config.strategy in BASELINES:
            yield from self._of_baseline() if self.me["_sure"] else ()
            return
        took = _criterion_of(self.whole, self.id)
        for name in CHECKS[config.strategy]:
            yield f"{name}: {'; '.join(self._of_criterion(name, name == took))}"
            if name == took:
                break
        if took and not self.criterion:
            sizes = f"{self.taken.height} of the {self.whole.height} samples of the rule"
            yield f"size {config.size} keeps {sizes}, drawn with seed {config.seed}"
        if self.criterion and config.strategy == "shuffled_reasoning":
            ids = self.taken["candidate_id"]
            giver = ids[int(donors(self.taken)[ids.to_list().index(self.id)])]
            yield f"its row holds the reasoning of {giver}"

    def _unmet_demand(self) -> str:
        lower, bound = self.me["_speedup_lower"], self.config.require_speedup_lower_above
        if bound is None or lower > bound:
            return "its verdict names no custom kernel (require_custom_kernel)"
        which = "(require_speedup_lower_above)"
        return f"the lower bound of its speedup, {lower:.4g}, is not above {bound:g} {which}"

    def _of_criterion(self, name: str, took: bool) -> Iterator[str]:
        equal = self.whole.filter(pl.col("candidate_id") != self.id, _kernel=self.me["_kernel"])
        if equal.height and not took:
            yield f"its kernel is that of {equal['candidate_id'][0]}, which was taken"
        if self.config.criterion_sizes and name in CONCUR and not took:
            most = self.config.criterion_sizes[CONCUR.index(name)]
            yield f"criterion_sizes takes {most:,} at most"
        if name == HIGH_SPEEDUP:
            speedup, least = self.me["_speedup"], self.config.min_speedup
            above = "above" if speedup > least else "not above"
            yield f"speedup {speedup:.4g} is {above} {least:g}" if speedup else "it was not timed"
            return
        if name in (CONCISE_AND_FAST, SHORTEST):
            yield self._length()
        if name in (CONCISE_AND_FAST, FASTEST):
            yield self._speed("exact" if name == FASTEST else self.config.equal_speedups)
        if name == CONCISE_AND_FAST and self.config.strategy == "concur_two_correct":
            yield f"its task has {self.me['_rivals']} correct, and two are required"
        rows = self.whole.filter(criterion=name)
        winner = rows.filter(pl.col("candidate_id") != self.id, task_id=self.me["task_id"])
        seed = f"(seed {self.config.seed})"
        if name == SINGLE_OPERATOR and not self.me["_single"]:
            yield "its task is a fusion, not a single operator"
        elif took and name in (FASTEST, SHORTEST):
            yield f"its task was drawn {seed}"
        elif took and name != CONCISE_AND_FAST:
            yield (
                "it comes first among the samples of its task that were not yet taken, and its"
                " task's turn came before the quota was met"
            )
        elif winner.height and not took:
            taken = f"{winner['candidate_id'][0]} (sample {winner['sample_index'][0]})"
            yield f"{taken} of its task was taken"
        elif name in (FASTEST, SHORTEST):
            yield f"its task is not among the {rows.height:,} that were drawn {seed}"
        elif name != CONCISE_AND_FAST:
            ending = "as many as concur adds" if name == ANY_OPERATOR else "then the quota was met"
            yield f"{rows.height:,} were added and {ending}; none of them is of its task"

    def _length(self) -> str:
        tokens, lengths = self.me["reasoning_tokens"], self.rivals["reasoning_tokens"]
        first = self.rivals.sort("reasoning_tokens", "sample_index", "candidate_id")
        if (least := first["reasoning_tokens"][0]) != tokens:
            shortest = f"the shortest correct of its task has {least:,}"
            return f"reasoning {tokens:,} tokens; {shortest} ({first['candidate_id'][0]})"
        others = int((lengths == tokens).sum()) - 1
        alike = f", as are {others} others" if others else ""
        of = f"the shortest of its task's {self.rivals.height} correct"
        return f"reasoning {tokens:,} tokens, {of}{alike}"

    def _speed(self, equal: object) -> str:
        speedup, rivals = self.me["_speedup"], self.rivals
        if not speedup:
            return "it was not timed"
        ordered = rivals.sort(-pl.col("_speedup"), "sample_index", "candidate_id")
        first = ordered.row(0, named=True)
        if speedup == first["_speedup"]:
            return f"speedup {speedup:.4g}, the fastest of its task's {rivals.height} correct"
        other = f"the fastest of its task has {first['_speedup']:.4g} ({first['candidate_id']})"
        if equal == "interval":
            alike = self.id in rivals.filter(is_fastest(equal))["candidate_id"]
            other += f"; their 95 % intervals {'overlap' if alike else 'do not overlap'}"
        return f"speedup {speedup:.4g}; {other}"

    def _of_baseline(self) -> Iterator[str]:
        """Its place within its task, then in the whole order."""
        config, single = self.config, self.me["_single"]
        order, balances, _ = BASELINES[config.strategy]
        sure = self.pool.filter("_sure")
        mine = ranked(sure.filter(task_id=self.me["task_id"]), order, None)["candidate_id"]
        if self.id not in mine:
            yield "it was not timed"
            return
        value = f"reasoning {self.me['reasoning_tokens']:,} tokens"
        if order == "speedup":
            value = f"speedup {self.me['_speedup']:.4g}"
        elif order == "random":
            value = f"drawn with seed {config.seed}"
        number = mine.to_list().index(self.id) + 1
        yield f"{value}: number {number} of its task's {len(mine)} in the order of the rule"
        same_kind = pl.col("_single") == single if balances else pl.lit(True)
        line = ranked(sure, order, config.max_per_task).filter(same_kind)["candidate_id"].to_list()
        if self.id not in line:
            before = ", ".join(mine[: config.max_per_task])
            yield f"at most {config.max_per_task} of a task: {before} came first"
            return
        kind = "samples" if not balances else "single operators" if single else "fusions"
        place = f"number {line.index(self.id) + 1:,} of {len(line):,} {kind}"
        count, size = self.taken.filter(same_kind).height, baseline_size(self.pool, config)
        yield f"{place} in that order; the set of {size:,} takes {count:,} of them"
