"""Why a candidate is in a training set, or why it is not, with the numbers that decided.

Guarantees: the answer is that of `strategies.select` on the same rows, which is asked, never
guessed; the reasons come in the order in which the rule looks, one a criterion. Does not guarantee
that one changed number would have brought the candidate in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl
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
    found = frame.filter(candidate_id=candidate_id).head(1)
    if found.is_empty():
        raise UsageError(
            f"there is no candidate {candidate_id!r} among {frame.height} rows",
            "give a candidate_id of the verdicts",
        )
    row = found.row(0, named=True)
    pool = drawn(eligible_samples(frame, config), config.seed)
    criterion = None
    if refusal := _not_eligible(row, config):
        reasons = [refusal]
    else:
        case = _Case(pool, config, candidate_id)
        reasons, criterion = case.reasons(), case.criterion
    return Explanation(
        candidate_id=candidate_id,
        task_id=row["task_id"],
        strategy=config.strategy,
        taken=criterion is not None,
        criterion=criterion,
        reasons=tuple(reasons),
    )


def _not_eligible(row: dict[str, Any], config: CurationConfig) -> str | None:
    """Why a row is not in the pool."""
    if row["status"] != "correct":
        reason = f"/{row['reason']}" if row.get("reason") else ""
        return f"status {row['status']}{reason}: only correct samples are taken"
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


def _criterion_of(rows: pl.DataFrame, candidate_id: str) -> str | None:
    found = rows.filter(candidate_id=candidate_id)["criterion"]
    return None if found.is_empty() else str(found[0])


@dataclass
class _Case:
    """One candidate of the pool, the correct samples of its task, and what the rule takes."""

    pool: pl.DataFrame
    config: CurationConfig
    candidate_id: str

    def __post_init__(self) -> None:
        self.me = self.pool.filter(candidate_id=self.candidate_id).row(0, named=True)
        self.rivals = self.pool.filter(task_id=self.me["task_id"])
        self.taken = select(self.pool, self.config)
        self.criterion = _criterion_of(self.taken, self.candidate_id)

    def reasons(self) -> list[str]:
        """One reason a criterion that was looked at."""
        config = self.config
        reasons = [] if self.me["_sure"] else self._unmet_demands()
        if config.strategy in BASELINES:
            return reasons + (self._of_baseline() if self.me["_sure"] else [])
        self.whole = RULES[config.strategy](self.pool, config)
        took = _criterion_of(self.whole, self.candidate_id)
        for name in CHECKS[config.strategy]:
            reasons.append(f"{name}: {self._of_criterion(name, name == took)}")
            if name == took:
                break
        if took and not self.criterion:
            reasons.append(
                f"size {config.size} keeps {self.taken.height} of the {self.whole.height} samples"
                f" of the rule, drawn with seed {config.seed}"
            )
        if self.criterion and config.strategy == "shuffled_reasoning":
            ids = self.taken["candidate_id"]
            giver = ids[int(donors(self.taken)[ids.to_list().index(self.candidate_id)])]
            reasons.append(f"its row holds the reasoning of {giver}")
        return reasons

    def _unmet_demands(self) -> list[str]:
        lower, bound = self.me["_speedup_lower"], self.config.require_speedup_lower_above
        if bound is not None and not lower > bound:
            return [
                f"the lower bound of its speedup, {lower:.4g}, is not above {bound:g}"
                " (require_speedup_lower_above)"
            ]
        return ["its verdict names no custom kernel (require_custom_kernel)"]

    def _of_criterion(self, name: str, took: bool) -> str:
        match name:
            case "high_speedup":
                return self._threshold()
            case "concise_and_fast":
                speed = self._speed(self.config.equal_speedups)
                return "; ".join([self._length(), speed, *self._winner(name)])
            case "fastest":
                return f"{self._speed('exact')}; {self._draw(name, took)}"
            case "shortest":
                return f"{self._length()}; {self._draw(name, took)}"
        if name == SINGLE_OPERATOR and not self.me["_single"]:
            return "its task is a fusion, not a single operator"
        if took:
            return (
                "it comes first among the samples of its task that were not yet taken, and its"
                " task's turn came before the quota was met"
            )
        if others := self._winner(name):
            return others[0]
        count = self.whole.filter(criterion=name).height
        ending = "as many as concur adds" if name == ANY_OPERATOR else "then the quota was met"
        return f"{count:,} were added and {ending}; none of them is of its task"

    def _threshold(self) -> str:
        speedup, least = self.me["_speedup"], self.config.min_speedup
        if not speedup:
            return "it was not timed"
        return f"speedup {speedup:.4g} is {'' if speedup > least else 'not '}above {least:g}"

    def _length(self) -> str:
        tokens, rivals = self.me["reasoning_tokens"], self.rivals
        first = rivals.sort("reasoning_tokens", "sample_index", "candidate_id").row(0, named=True)
        if first["reasoning_tokens"] < tokens:
            return (
                f"reasoning {tokens:,} tokens; the shortest correct of its task has"
                f" {first['reasoning_tokens']:,} ({first['candidate_id']})"
            )
        others = rivals.filter(reasoning_tokens=tokens).height - 1
        return (
            f"reasoning {tokens:,} tokens, the shortest of its task's {rivals.height} correct"
            + (f", as are {others} others" if others else "")
        )

    def _speed(self, equal: Any) -> str:
        speedup, rivals = self.me["_speedup"], self.rivals
        if not speedup:
            return "it was not timed"
        ordered = rivals.sort(-pl.col("_speedup"), "sample_index", "candidate_id")
        first = ordered.row(0, named=True)
        if speedup == first["_speedup"]:
            return f"speedup {speedup:.4g}, the fastest of its task's {rivals.height} correct"
        other = f"the fastest of its task has {first['_speedup']:.4g} ({first['candidate_id']})"
        if equal == "interval":
            alike = self.candidate_id in rivals.filter(is_fastest(equal))["candidate_id"]
            other += f"; their 95 % intervals {'overlap' if alike else 'do not overlap'}"
        return f"speedup {speedup:.4g}; {other}"

    def _winner(self, name: str) -> list[str]:
        """The sample of the same task that the criterion took instead, if there is one."""
        rows = self.whole.filter(criterion=name, task_id=self.me["task_id"])
        if rows.is_empty() or rows["candidate_id"][0] == self.candidate_id:
            return []
        return [
            f"{rows['candidate_id'][0]} (sample {rows['sample_index'][0]}) of its task was taken"
        ]

    def _draw(self, name: str, took: bool) -> str:
        seed = self.config.seed
        if took:
            return f"its task was drawn (seed {seed})"
        count = self.whole.filter(criterion=name).height
        absent = f"its task is not among the {count:,} that were drawn (seed {seed})"
        return (self._winner(name) or [absent])[0]

    def _of_baseline(self) -> list[str]:
        """Its place within its task, then in the whole order."""
        config, single = self.config, self.me["_single"]
        order, balances, _ = BASELINES[config.strategy]
        sure = self.pool.filter("_sure")
        mine = ranked(sure.filter(task_id=self.me["task_id"]), order, None)["candidate_id"]
        if self.candidate_id not in mine:
            return ["it was not timed"]
        value = f"reasoning {self.me['reasoning_tokens']:,} tokens"
        if order == "speedup":
            value = f"speedup {self.me['_speedup']:.4g}"
        elif order == "random":
            value = f"drawn with seed {config.seed}"
        number = mine.to_list().index(self.candidate_id) + 1
        first = f"{value}: number {number} of its task's {len(mine)} in the order of the rule"
        same_kind = pl.col("_single") == single if balances else pl.lit(True)
        line = ranked(sure, order, config.max_per_task).filter(same_kind)["candidate_id"].to_list()
        if self.candidate_id not in line:
            before = ", ".join(mine[: config.max_per_task])
            return [first, f"at most {config.max_per_task} of a task: {before} came first"]
        kind = "samples"
        if balances:
            kind = "single operators" if single else "fusions"
        place = f"number {line.index(self.candidate_id) + 1:,} of {len(line):,} {kind}"
        count = self.taken.filter(same_kind).height
        size = baseline_size(self.pool, config)
        return [first, f"{place} in that order; the set of {size:,} takes {count:,} of them"]
