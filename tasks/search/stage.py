"""Verdicts in, faster candidates out, in generations.

Guarantees: a killed run resumes with the same proposals. A task's codes differ, unless a model
repeats one, which shares the verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import geometric_mean
from typing import Any, Protocol

import polars as pl
import pyarrow as pa

from kernels_eval.errors import UsageError
from kernels_eval.records import Candidate, Json, Language, Row, SamplingParams, candidate_id
from tasks.progress import report
from tasks.search.config import OF_MODELS, SearchConfig
from tasks.search.parameters import usage
from tasks.search.population import START, Member, Plan, Population
from tasks.sources.stage import read_tasks
from tasks.store import Snapshot, SnapshotRef
from tasks.tables import CANDIDATES, CORRECT, SEARCHED
from tasks.versions import SEARCH_VERSION

STAGE = "search"
SETTLED = ("candidate_id", "timing.speedup", "timing.speedup_lower", "run_s")
"""Columns of verdicts that a search reads."""
SCHEMA = pa.schema([*CANDIDATES, *SEARCHED])
"""A candidate, and how it came to be: `step` is 0 or less for a start, `operator` "start" or how
it was made, `change` what was changed, `parents` ids of candidates of this snapshot."""


class Judge(Protocol):
    """A verifier of proposals, such as tasks.verification.stage.Verification."""

    snapshot: Snapshot

    def plan(self) -> int: ...

    def verify_chunk(self, number: int) -> object: ...


Write = Callable[[Sequence[Plan]], Iterator[tuple[Plan, Row]]]
"""Rows of tasks.tables.CANDIDATES for what is planned, as a model writes them."""


class Search:
    """A search over a verification's correct candidates.

    `conditions` is what verdicts depend on beside the code; `writer` identifies the rewriting
    model, if any.
    """

    def __init__(
        self,
        verdicts: SnapshotRef,
        candidates: SnapshotRef,
        tasks: SnapshotRef,
        config: SearchConfig,
        language: Language,
        *,
        conditions: object,
        writer: object = None,
    ) -> None:
        self.config, self.language = config, language
        self._verdicts, self._candidates, self._tasks = verdicts, candidates, tasks
        asked = writer if OF_MODELS & set(config.operators) else None
        identity = [config.model_dump(mode="json"), language.value, conditions, asked]
        above = (verdicts, candidates, tasks)
        self.snapshot = Snapshot.planned(STAGE, identity, above, SEARCH_VERSION)
        self.populations: dict[str, Population] = {}
        self.confirmed: SnapshotRef | None = None
        """The verdicts that chose the winners, where some were confirmed."""

    def begin(self, judge: Judge, write: Write | None) -> None:
        self.judge, self.write, snapshot = judge, write, self.snapshot
        if not snapshot.finished:
            snapshot.recover(SCHEMA)
            self._add_starts()
        self._task_of = {task.task_id: task for task in read_tasks(self._tasks)}
        columns = ["candidate_id", "task_id", "code", "turn", *SEARCHED.names]
        rows = snapshot.read(columns=columns, unique="candidate_id").sort("task_id", "step")
        for row in rows.iter_rows(named=True):
            self._add(row)
        self.settle()

    def _add(self, row: Row) -> None:
        task, code = self._task_of[row["task_id"]], row["code"] or ""
        new = Population(task, self.language, self.config)
        known = {name: row[name] for name in ("candidate_id", "step", "operator", "change", "turn")}
        parents, resource = tuple(row["parents"]), usage(code, self.language)
        member = Member(**known, code=code, parents=parents, resource=resource)
        self.populations.setdefault(task.task_id, new).add(member)

    def _add_starts(self) -> None:
        verdicts = self._verdicts.open()
        columns = ["candidate_id", "task_id", "language", "status", "timing.speedup_lower"]
        chosen = (
            verdicts.read(columns=columns, unique="candidate_id")
            .filter(CORRECT, pl.col("language") == self.language.value)
            .sort("task_id", -pl.col("speedup_lower").fill_null(0), "candidate_id")
            .with_columns(step=-pl.int_range(pl.len()).over("task_id"))
            .filter(pl.col("step") > -self.config.starts)
            .filter(pl.col("task_id").rank("dense") <= (self.config.tasks or pl.len()))
        )
        if chosen.is_empty():
            raise UsageError(
                f"no {self.language.value} candidate of {verdicts.path} is correct",
                "search begins with correct candidates: verify some first",
            )
        steps = dict(chosen.select("candidate_id", "step").iter_rows())
        left = steps.keys() - self.snapshot.keys("candidate_id")
        rows = self._candidates.open().rows_by("candidate_id", left)
        started = {"operator": START, "change": "", "parents": []}
        made = ({**row, **started, "step": steps[row["candidate_id"]]} for row in rows)
        self.snapshot.append(made, SCHEMA)

    # -- a generation ------------------------------------------------------------------------------

    def run_generation(self, number: int) -> int:
        """Propose, verify and settle generation `number` (0: the starts). Returns its number of
        candidates, 0 where the search is over. The same call resumes."""
        proposed = self._propose(number) if number else len(self.populations)
        if proposed:
            for chunk in range(1, self.judge.plan() + 1):
                self.judge.verify_chunk(chunk)
            self.settle()
            done = sum(each.evaluations for each in self.populations.values())
            total = self.config.evaluations * len(self.populations)
            report(STAGE, done, total, f"generation {number}: {self.gain:.3g} x (not confirmed)")
        return proposed

    def _propose(self, number: int) -> int:
        first = self.config.first_step(number)
        if self.config.device_s is not None and self.device_s(first) >= self.config.device_s:
            return 0
        plans = [(each, x) for each in self.populations.values() for x in each.plans(number)]
        missing = [plan for population, plan in plans if plan.step not in population.members]
        with self.snapshot.journal(SCHEMA) as add:
            for row in self._rows(missing):
                add(row)
                self._add(row)
        return len(plans)

    def _rows(self, plans: Sequence[Plan]) -> Iterator[Row]:
        yield from (row_of(plan, self.language) for plan in plans if plan.code is not None)
        if questions := [plan for plan in plans if plan.code is None]:
            if self.write is None:
                raise UsageError(
                    "search.operators names rewrite or cross, and no model is asked",
                    "set synthesis.sampler to a model, or search.operators to [parameters]",
                )
            for plan, written in self.write(questions):
                yield {**written, **described(plan)}

    def settle(self) -> None:
        rows = self.judge.snapshot.read(columns=SETTLED, unique="candidate_id")
        known = {row["candidate_id"]: row for row in rows.iter_rows(named=True)}
        for population in self.populations.values():
            for member in list(population.members.values()):
                if not member.settled and (row := known.get(member.candidate_id)):
                    seconds = row["run_s"] or 0.0
                    population.add(replace(timed(member, row), device_s=seconds))

    def populations_by(self, verdicts: pl.DataFrame) -> dict[str, Population]:
        """The populations with speedups of other verdicts (columns `SETTLED`)."""
        known = {row["candidate_id"]: row for row in verdicts.iter_rows(named=True)}
        found = {}
        for name, population in self.populations.items():
            found[name] = Population(population.task, self.language, self.config)
            for member in population.members.values():
                row = known.get(member.candidate_id)
                found[name].add(timed(member, row) if row else member)
        return found

    def confirm(self, verdicts: SnapshotRef) -> None:
        self.confirmed = verdicts
        rows = verdicts.open().read(columns=SETTLED, unique="candidate_id")
        self.populations = self.populations_by(rows)

    # -- what came of it ---------------------------------------------------------------------------

    @property
    def gain(self) -> float:
        """Geometric mean over tasks of best / start by the search's verdicts: too high, as the best
        are partly luck."""
        curves = [each.curve()[-1] for each in self.populations.values() if each.start]
        return geometric_mean(curves) if curves else 1.0

    def device_s(self, before: float = math.inf) -> float:
        members = (each.members for each in self.populations.values())
        return sum(one[step].device_s for one in members for step in sorted(one) if step < before)

    def publish(self) -> SnapshotRef:
        if not self.snapshot.finished:
            rows = len(self.snapshot.keys("candidate_id"))
            self.snapshot.publish(config=self.config, rows=rows)
        return self.snapshot.ref


def run(
    search: Search,
    judge: Judge,
    write: Write | None = None,
    *,
    run_generation: Callable[[Any, int], int] = Search.run_generation,
) -> SnapshotRef:
    """The whole search: a finished snapshot of `SCHEMA`. `run_generation` calls a generation
    (Prefect makes it a task run)."""
    search.begin(judge, write)
    number = 0
    while not search.snapshot.finished and run_generation(search, number):
        number += 1
    return search.publish()


# -- rows ------------------------------------------------------------------------------------------


def timed(member: Member, verdict: Row) -> Member:
    speedup, lower = verdict["speedup"] or 0.0, verdict["speedup_lower"] or 0.0
    return replace(member, speedup=speedup, lower=lower)


def described(plan: Plan) -> Json:
    return {
        "step": plan.step,
        "operator": plan.operator,
        "change": plan.change,
        "parents": [parent.candidate_id for parent in plan.parents],
    }


def row_of(plan: Plan, language: Language) -> Json:
    parent, generator = plan.parents[0].candidate_id, f"{STAGE}: {plan.operator}"
    code = plan.code or ""
    known = (plan.task, generator, SamplingParams(), plan.step, code, plan.turn, parent)
    candidate = Candidate(
        candidate_id=candidate_id(*known),
        task_id=plan.task.task_id,
        language=language,
        generator=generator,
        sample_index=plan.step,
        code=code,
        turn=plan.turn,
        parent=parent,
    )
    key = {"request_key": candidate.candidate_id}
    return candidate.model_dump(mode="json") | key | described(plan)
