"""One task's population: members, breeding, operators and budget.

Islands breed apart, except for migrants. Each keeps the fastest member per cell (MAP-Elites,
arXiv:1504.04909). Parents win tournaments of two. UCB1 chooses operators (Auer, Cesa-Bianchi and
Fischer 2002, theorem 1): highest mean reward + EXPLORATION sqrt(2 ln n / n_j); a reward is
log2(child's speed / fastest parent's) within [0, 1], 0 for an incorrect child.

Guarantees: plans depend on configuration, task, generation and earlier members alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from types import FunctionType

from kernels_eval.extensions import load_extension
from kernels_eval.records import KernelTask, Language
from tasks.search import flags, parameters
from tasks.search.config import BUILT_IN, GROUP, OF_MODELS, SearchConfig

START = "start"
ATTEMPTS = 20
ISLANDS = 2
"""Populations of a task that breed apart."""
MIGRATION = 0.1
"""Share of the evaluations whose parents come from all islands."""
EXPLORATION = 0.5
"""Weight of the confidence bound by which operators are chosen."""
"""Draws for a candidate that has not been proposed before."""


@dataclass(frozen=True)
class Member:
    """A proposed candidate. `speedup` and `lower` are None without a verdict, 0 where incorrect;
    `resource` is its `usage`."""

    candidate_id: str
    code: str
    step: int
    operator: str
    parents: tuple[str, ...] = ()
    change: str = ""
    speedup: float | None = None
    lower: float = 0.0
    device_s: float = 0.0
    resource: float = 0.0
    turn: int = 1

    @property
    def settled(self) -> bool:
        return self.speedup is not None

    @property
    def score(self) -> float:
        return self.speedup or 0.0

    @property
    def cell(self) -> tuple[int, ...]:
        """Its archive cell: half doublings of speed, doublings of the others."""
        length = math.floor(math.log2(1 + len(self.code)))
        return (
            math.floor(2 * math.log2(self.score)),
            math.floor(math.log2(1 + self.resource)),
            length,
        )


@dataclass(frozen=True)
class Plan:
    """A proposal for a step. `code` is None where a model must improve on `parents`."""

    task: KernelTask
    step: int
    operator: str
    parents: tuple[Member, ...]
    code: str | None = None
    change: str = ""

    @property
    def turn(self) -> int:
        return 1 + max(parent.turn for parent in self.parents)


class Population:
    """A task's members by step; the starts are `config.starts` or fewer."""

    def __init__(self, task: KernelTask, language: Language, config: SearchConfig) -> None:
        self.task, self.language, self.config = task, language, config
        self.members: dict[int, Member] = {}

    def add(self, member: Member) -> None:
        self.members[member.step] = member

    def parents(self, member: Member) -> list[Member]:
        known = {each.candidate_id: each for each in self.members.values()}
        return [known[each] for each in member.parents if each in known]

    @property
    def starts(self) -> list[Member]:
        return [each for each in self._correct() if each.operator == START]

    @property
    def start(self) -> Member | None:
        """The fastest start by its speedup's lower bound; None where none is correct."""
        return max(self.starts, key=_surely, default=None)

    @property
    def best(self) -> Member | None:
        return max(self._correct(), key=_surely, default=None)

    @property
    def evaluations(self) -> int:
        return sum(each.operator != START and each.settled for each in self.members.values())

    def _correct(self, before: float = math.inf) -> list[Member]:
        found = sorted(self.members.values(), key=lambda each: each.step)
        return [each for each in found if each.score > 0 and each.step < before]

    # -- what comes next ---------------------------------------------------------------------------

    def plans(self, generation: int) -> Iterable[Plan]:
        """A generation's proposals (1 or later), once earlier ones are settled; the same when
        planned again. Fewer or none where budget, patience or novelty ends."""
        first = self.config.first_step(generation)
        last = min(first + self.config.batch - 1, self.config.evaluations)
        if self._is_spent(first):
            return
        seen = {each.code for each in self.members.values() if each.step < first}
        pulled: list[str] = []
        for step in range(first, last + 1):
            if plan := self._plan(step, first, seen, pulled):
                pulled.append(plan.operator)
                there = self.members.get(step)
                seen.add(there.code if there else plan.code or "")
                yield plan

    def _is_spent(self, before: int) -> bool:
        patience, correct = self.config.patience, self._correct(before)
        if not self.starts or patience is None or before <= patience:
            return not self.starts
        record = max(each.score for each in correct if each.step < before - patience)
        return all(each.score <= record for each in correct)

    def _plan(self, step: int, before: int, seen: set[str], pulled: Sequence[str]) -> Plan | None:
        draw = Random(f"{self.config.seed}/{self.task.task_id}/{step}")
        for operator in self._operators(before, pulled, draw):
            plan = Plan(self.task, step, operator, self._parents(operator, step, before, draw))
            if operator in OF_MODELS:
                return plan
            for _ in range(ATTEMPTS):
                found = self._changed(operator, plan.parents[0].code, draw)
                if found and found[0] not in seen:
                    return replace(plan, code=found[0], change=found[1])
        return None

    def _changed(self, operator: str, code: str, draw: Random) -> tuple[str, str] | None:
        match operator:
            case "parameters":
                jointly = self.config.method == "random"
                return parameters.changed(code, self.language, draw, jointly=jointly)
            case "flags":
                return flags.changed(code, self.language, draw)
        change = load_extension(GROUP, operator, FunctionType, BUILT_IN)
        found: tuple[str, str] | None = change(code, self.language, draw, self.config.options)
        return found

    def _operators(self, before: int, pulled: Sequence[str], draw: Random) -> list[str]:
        operators = list(self.config.operators)
        draw.shuffle(operators)
        if self.config.method == "random":
            return operators
        rewards: dict[str, list[float]] = {operator: [] for operator in operators}
        for step in sorted(self.members):  # sums of floats depend on the order
            member = self.members[step]
            if 0 < step < before and member.operator in rewards:
                rewards[member.operator].append(self._reward(member))
        for operator in pulled:  # of this generation: nothing is known of them yet
            rewards[operator].append(0.0)
        total = sum(map(len, rewards.values()))

        def bound(operator: str) -> float:
            found = rewards[operator]
            if not found:
                return math.inf
            spread = math.sqrt(2 * math.log(total) / len(found))
            return sum(found) / len(found) + EXPLORATION * spread

        return sorted(operators, key=bound, reverse=True)

    def _reward(self, member: Member) -> float:
        parents = [parent.score for parent in self.parents(member)]
        if not member.score or not parents:
            return 0.0
        return min(1.0, max(0.0, math.log2(member.score / max(parents))))

    def _parents(self, operator: str, step: int, before: int, draw: Random) -> tuple[Member, ...]:
        if self.config.method == "random":
            return tuple(draw.choices(self.starts, k=2 if operator == "cross" else 1))
        migrates = draw.random() < MIGRATION
        island = None if migrates else step % ISLANDS
        elites = self.elites(before, island)
        first = max(draw.choices(elites, k=2), key=lambda each: each.score)
        if operator != "cross":
            return (first,)
        others = [each for each in self.elites(before, None) if each is not first] or [first]
        return first, max(draw.choices(others, k=2), key=lambda each: each.score)

    def elites(self, before: float = math.inf, island: int | None = None) -> list[Member]:
        """The fastest of each cell, of an island or all; starts are on every island."""
        cells: dict[tuple[int, ...], Member] = {}
        for each in sorted(self._correct(before), key=lambda each: -each.score):
            if island is None or each.operator == START or each.step % ISLANDS == island:
                cells.setdefault(each.cell, each)
        return sorted(cells.values(), key=lambda each: each.step)

    def curve(self) -> list[float]:
        """After each evaluation, the best speedup as a multiple of the start's, by the search's
        verdicts."""
        base = self.start.score if self.start else 1.0
        steps = range(1, self.config.evaluations + 1)
        found = [self.members[step].score if step in self.members else 0.0 for step in steps]
        return [max(best, base) / base for best in accumulate(found, max)]

    def lineage(self, member: Member) -> list[Member]:
        line = [member]
        while parents := self.parents(line[0]):
            line.insert(0, parents[0])
        return line


def _surely(member: Member) -> tuple[float, int]:
    return member.lower, -member.step
