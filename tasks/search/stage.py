"""Verdicts in, faster candidates out: generation by generation, each proposal verified once.

Guarantees: proposals are on disk before they are verified, and verdicts as they come; a run that
was killed resumes with the same proposals, asks no model and no worker twice, and a finished search
does nothing. A generation of all tasks is verified together; it is proposed from the verdicts of
those before it, and from the seed, the task and the step alone, but for what a model writes. No two
proposals of a task have the same code, unless a model repeats itself, and then its verdict is
shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pyarrow as pa

from kernels_eval.errors import UsageError
from kernels_eval.records import (
    Candidate,
    KernelTask,
    Language,
    SamplingParams,
    candidate_id,
    stable_hash,
)
from tasks.progress import report
from tasks.search.config import OF_MODELS, SearchConfig
from tasks.search.parameters import usage
from tasks.search.population import START, Member, Plan, Population
from tasks.sources.stage import read_tasks
from tasks.store import Snapshot, SnapshotRef, fingerprint
from tasks.tables import CANDIDATES
from tasks.versions import SEARCH_VERSION

STAGE = "search"
COLUMNS = (
    ("step", pa.int64()),
    ("operator", pa.string()),
    ("change", pa.string()),
    ("parents", pa.list_(pa.string())),
)
SCHEMA = pa.schema([*CANDIDATES, *COLUMNS])
"""A candidate, and how it came to be: `step` is 0 or less for a start, `operator` "start" or how
it was made, `change` what was changed, `parents` ids of candidates of this snapshot."""
GENERATOR = "search"
Row = Mapping[str, Any]


class Judge(Protocol):
    """Who verifies what a search proposes, such as tasks.verification.stage.Verification."""

    snapshot: Snapshot

    def plan(self) -> int: ...

    def verify_chunk(self, number: int) -> Any: ...


@dataclass(frozen=True)
class Asked:
    """What a model is to write: a better kernel than those of the parents."""

    task: KernelTask
    plan: Plan
    turn: int


Write = Callable[[Sequence[Asked]], Iterator[tuple[Asked, Row]]]
"""Rows of tasks.tables.CANDIDATES for what is asked, as a model writes them."""


class Search:
    """One search over the correct candidates of a verification. `conditions` is what verdicts
    depend on beside the code; `writer` identifies the model that rewrites, where one is asked."""

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
        self.upstream = [ref.fingerprint for ref in (verdicts, candidates, tasks)]
        self._verdicts, self._candidates, self._tasks = verdicts, candidates, tasks
        asked = writer if OF_MODELS & set(config.operators) else None
        identity = [config.model_dump(mode="json"), language.value, conditions, asked]
        name = fingerprint(STAGE, identity, self.upstream, SEARCH_VERSION)
        self.snapshot = Snapshot(tasks.root, STAGE, name)
        self.populations: dict[str, Population] = {}
        self.judge: Judge | None = None
        self.write: Write | None = None
        self._turns: dict[str, int] = {}
        self._task_of: dict[str, KernelTask] = {}

    def begin(self, judge: Judge, write: Write | None) -> None:
        """Read what there is: a search that was stopped, or none yet."""
        self.judge, self.write = judge, write
        if not self.snapshot.finished:
            self.snapshot.recover(SCHEMA)
            self._add_starts()
        self._task_of = {task.task_id: task for task in read_tasks(self._tasks)}
        self.populations = read_populations(
            self.snapshot, judge.snapshot, self.language, self.config
        )
        rows = self.snapshot.read(columns=["candidate_id", "turn"], unique="candidate_id")
        self._turns = dict(rows.select("candidate_id", "turn").iter_rows())

    def _add_starts(self) -> None:
        """The fastest correct candidates of each task. Raises UsageError where there is none."""
        import polars as pl

        columns = ["candidate_id", "task_id", "language", "status", "timing.speedup_lower"]
        rows = self._verdicts.open().read(columns=columns, unique="candidate_id")
        correct = rows.filter(
            pl.col("status") == "correct", pl.col("language") == self.language.value
        )
        chosen = (
            correct.sort(
                "task_id",
                pl.col("speedup_lower").fill_null(0),
                "candidate_id",
                descending=[False, True, False],
            )
            .group_by("task_id", maintain_order=True)
            .head(self.config.starts)
        )
        if self.config.tasks:
            named = chosen["task_id"].unique(maintain_order=True).head(self.config.tasks)
            chosen = chosen.filter(pl.col("task_id").is_in(named.to_list()))
        if chosen.is_empty():
            raise UsageError(
                f"no {self.language.value} candidate of {self._verdicts.open().path} is correct",
                "search begins with correct candidates: verify some first",
            )
        rank = {name: place for place, name in enumerate(chosen["candidate_id"])}
        first: dict[str, int] = {}
        for name, task in chosen.select("candidate_id", "task_id").iter_rows():
            first.setdefault(task, rank[name])
        there = self.snapshot.keys("candidate_id")
        index = (
            self._candidates.open()
            .index(["candidate_id"])
            .unique("candidate_id", keep="first", maintain_order=True)
        )
        wanted = index.filter(pl.col("candidate_id").is_in(list(set(rank) - there)))
        self.snapshot.append(
            (
                row
                | {"turn": row.get("turn") or 1, "parent": row.get("parent")}
                | {"step": first[row["task_id"]] - rank[row["candidate_id"]]}
                | {"operator": START, "change": "", "parents": []}
                for row in self._candidates.open().rows_of(wanted)
            ),
            SCHEMA,
        )

    # -- a generation ------------------------------------------------------------------------------

    def run_generation(self, number: int) -> int:
        """Propose, verify and settle generation `number`; 0 is that of the starts. Returns how many
        candidates it has: 0 where the search is over. The same call resumes it."""
        assert self.judge is not None
        proposed = len(self._of(number)) if number == 0 else self._propose(number)
        if proposed:
            for chunk in range(1, self.judge.plan() + 1):
                self.judge.verify_chunk(chunk)
            self.settle()
            done, total = self.evaluations, self.config.evaluations * len(self.populations)
            report(STAGE, done, total, f"generation {number}: {self.gain:.3g} x (not confirmed)")
        return proposed

    def _of(self, number: int) -> list[Member]:
        found = [each for p in self.populations.values() for each in p.members.values()]
        batch = self.config.batch
        return [each for each in found if max(0, -(-each.step // batch)) == number]

    def _propose(self, number: int) -> int:
        if self.config.device_s is not None and self.device_s(number) >= self.config.device_s:
            return 0
        made: list[Row] = []
        asked: list[Asked] = []
        count = 0
        for population in self.populations.values():
            task = self._task_of[population.task_id]
            for plan in population.plans(number):
                count += 1
                turn = 1 + max(self._turns[parent.candidate_id] for parent in plan.parents)
                if plan.step in population.members:
                    continue
                if plan.code is None:
                    asked.append(Asked(task, plan, turn))
                else:
                    made.append(row_of(task, self.language, plan, plan.code, turn))
        with self.snapshot.journal(SCHEMA) as add:
            for row in made:
                self._add(row, add)
            for each, written in self._written(asked):
                self._add({**written, **described(each.plan)}, add)
        return count

    def _written(self, asked: list[Asked]) -> Iterator[tuple[Asked, Row]]:
        if not asked:
            return iter(())
        if self.write is None:
            raise UsageError(
                "search.operators names rewrite or cross, and no model is asked",
                "set synthesis.sampler to a model, or search.operators to [parameters]",
            )
        return self.write(asked)

    def _add(self, row: Row, add: Callable[[Row], None]) -> None:
        add(row)
        self._turns[row["candidate_id"]] = row["turn"]
        self.populations[row["task_id"]].add(member_of(row, self.language))

    def settle(self) -> None:
        """Take the verdicts that are there into the populations."""
        assert self.judge is not None
        settle(self.populations.values(), self.judge.snapshot)

    # -- what came of it ---------------------------------------------------------------------------

    @property
    def evaluations(self) -> int:
        return sum(each.evaluations for each in self.populations.values())

    @property
    def gain(self) -> float:
        """Geometric mean over tasks of best / start, by the search's own verdicts: too high, since
        the best of many is partly the luckiest."""
        from statistics import geometric_mean

        curves = [each.curve()[-1] for each in self.populations.values() if each.start]
        return geometric_mean(curves) if curves else 1.0

    def device_s(self, before: int | None = None) -> float:
        """Seconds that verdicts held a device, of all generations or of those before one."""
        return sum(
            each.device_s
            for population in self.populations.values()
            for _, each in sorted(population.members.items())
            if before is None or population.generation_of(each.step) < before
        )

    def publish(self) -> SnapshotRef:
        """Finish the snapshot of proposals."""
        if not self.snapshot.finished:
            rows = len(self.snapshot.keys("candidate_id"))
            self.snapshot.publish(config=self.config, upstream=self.upstream, rows=rows)
        return self.snapshot.ref


def run(
    search: Search,
    judge: Judge,
    write: Write | None = None,
    *,
    run_generation: Callable[[Any, int], int] = Search.run_generation,
) -> SnapshotRef:
    """The whole search as a plain call: a finished snapshot of `SCHEMA`. `run_generation` is how
    one is called (Prefect makes a task run of it)."""
    search.begin(judge, write)
    number = 0
    while not search.snapshot.finished and run_generation(search, number):
        number += 1
    return search.publish()


# -- rows ------------------------------------------------------------------------------------------


def described(plan: Plan) -> dict[str, Any]:
    """What a row says of how its candidate came to be."""
    return {
        "step": plan.step,
        "operator": plan.operator,
        "change": plan.change,
        "parents": [parent.candidate_id for parent in plan.parents],
    }


def row_of(
    task: KernelTask, language: Language, plan: Plan, code: str, turn: int
) -> dict[str, Any]:
    """The row of a candidate that no model wrote."""
    parent = plan.parents[0].candidate_id
    asked = (task, f"{GENERATOR}: {plan.operator}", SamplingParams(), plan.step)
    candidate = Candidate(
        candidate_id=candidate_id(*asked, code, turn, parent),
        task_id=task.task_id,
        language=language,
        generator=f"{GENERATOR}: {plan.operator}",
        sample_index=plan.step,
        code=code,
        turn=turn,
        parent=parent,
    )
    key = stable_hash([candidate.candidate_id, plan.step])
    return candidate.model_dump(mode="json") | {"request_key": key} | described(plan)


def member_of(row: Row, language: Language) -> Member:
    """A member whose verdict is not known yet."""
    return Member(
        candidate_id=row["candidate_id"],
        code=row["code"] or "",
        step=row["step"],
        operator=row["operator"],
        parents=tuple(row["parents"] or ()),
        change=row["change"] or "",
        resource=usage(row["code"] or "", language),
    )


def read_populations(
    proposals: Snapshot, verdicts: Snapshot, language: Language, config: SearchConfig
) -> dict[str, Population]:
    """The populations of a search by task, in the order of their ids, with the verdicts that are
    there."""
    columns = ["candidate_id", "task_id", "code", *(name for name, _ in COLUMNS)]
    found: dict[str, Population] = {}
    rows = proposals.read(columns=columns, unique="candidate_id").sort("task_id", "step")
    for row in rows.iter_rows(named=True):
        task = row["task_id"]
        found.setdefault(task, Population(task, language, config)).add(member_of(row, language))
    settle(found.values(), verdicts)
    return found


def settle(populations: Iterable[Population], verdicts: Snapshot) -> None:
    """Note the verdicts of members that have none yet."""
    columns = ["candidate_id", "timing.speedup", "timing.speedup_lower", "run_s"]
    if not verdicts.parts():
        return
    rows = verdicts.read(columns=columns, unique="candidate_id")
    known = {row["candidate_id"]: row for row in rows.iter_rows(named=True)}
    for population in populations:
        for member in list(population.members.values()):
            if not member.settled and (row := known.get(member.candidate_id)):
                speedup, lower = row["speedup"] or 0.0, row["speedup_lower"] or 0.0
                seconds = row["run_s"] or 0.0
                population.add(replace(member, speedup=speedup, lower=lower, device_s=seconds))
