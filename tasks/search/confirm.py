"""Snapshots of a confirmed gain: remeasurements, and candidates with confirmed winners.
`tasks.search.gain` computes the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import polars as pl

from kernels_eval.records import Candidate, Json, Row
from tasks.search.gain import Interval, again, pair_of, result_of, summary_of
from tasks.search.stage import Search
from tasks.store import Snapshot, SnapshotRef
from tasks.tables import CANDIDATES
from tasks.versions import SEARCH_VERSION

CONFIRMATION, IMPROVED = "search-confirmation", "improved"


def winners(search: Search, verdicts: pl.DataFrame) -> set[str]:
    """Ids of each task's start and winner by these verdicts (columns `tasks.search.stage.SETTLED`),
    where a start did not win."""
    pairs = map(pair_of, search.populations_by(verdicts).values())
    return {member.candidate_id for pair in pairs if pair for member in pair}


def confirmation(search: Search) -> SnapshotRef:
    """A finished snapshot of tasks.tables.CANDIDATES to measure again."""
    rows = (
        Candidate(
            candidate_id=each.key,
            task_id=population.task.task_id,
            language=search.language,
            generator="search: confirmation",
            sample_index=each.place,
            code=each.member.code,
        ).model_dump(mode="json")
        for population in search.populations.values()
        for each in again(population)
    )
    return _filled(CONFIRMATION, search, rows, [search.snapshot.ref, search.confirmed])


def _filled(
    stage: str,
    search: Search,
    rows: Iterable[Row],
    above: list[SnapshotRef | None],
    extra: Any = None,
) -> SnapshotRef:
    snapshot = Snapshot.planned(stage, {}, above, SEARCH_VERSION)
    if not snapshot.finished:
        there = snapshot.keys("candidate_id")
        snapshot.append((row for row in rows if row["candidate_id"] not in there), CANDIDATES)
        count = len(snapshot.keys("candidate_id"))
        snapshot.publish(config=search.config, rows=count, extra=extra)
    return snapshot.ref


def told_of(search: Search, fresh: Snapshot) -> Json:
    fields = ("speedup", "speedup_lower", "speedup_upper")
    columns = ["candidate_id", *(f"timing.{name}" for name in fields)]
    rows = fresh.read(columns=columns).rows()
    found = {name: Interval(*numbers) for name, *numbers in rows if None not in numbers}
    results = [result_of(each, found) for each in search.populations.values()]
    asked = {"method": search.config.method, "operators": list(search.config.operators)}
    return asked | summary_of(results, search.populations.values())


# -- samples of a later turn -----------------------------------------------------------------------


def improved(
    search: Search, candidates: SnapshotRef, fresh: SnapshotRef, summary: Row
) -> SnapshotRef:
    """A finished snapshot of tasks.tables.CANDIDATES: those searched among, and each confirmed
    winner as a later turn of its start. `fresh`: the confirming verdicts; `summary`: the manifest's
    `search`."""
    every = candidates.open().rows_by("candidate_id")
    rows = chain(every, _winners(search, summary["results"]))
    above: list[SnapshotRef | None] = [candidates, search.snapshot.ref, fresh]
    return _filled(IMPROVED, search, rows, above, {"search": summary})


def _winners(search: Search, results: Sequence[Row]) -> Iterator[Row]:
    lines = [[x["candidate_id"] for x in row["lineage"]] for row in results if row["improved"]]
    found = search.snapshot.rows_by("candidate_id", chain(*lines))
    rows = {row["candidate_id"]: row for row in found}
    for line in lines:
        yield with_reasoning([rows[key] for key in line])


def with_reasoning(line: Sequence[Row]) -> Json:
    """The winner of a lineage (start first) as a later turn's sample."""
    start, winner = line[0], dict(line[-1])
    origin = next(row for row in reversed(line) if row["response"] or row is start)
    if origin is not line[-1]:
        fenced = f"```python\n{winner['code'].rstrip()}\n```"
        reasoning = origin["reasoning"]
        names = ("reasoning", "separated_reasoning", "reasoning_tokens", "sampling", "prompt_hash")
        winner |= {name: origin[name] for name in names}
        winner |= {"generator": f"{origin['generator']} + search", "answer": fenced}
        winner |= {"response": f"<think>\n{reasoning}\n</think>\n\n{fenced}\n"}
        winner |= {"finish_reason": "stop", "separated_reasoning": None}
    winner |= {"turn": (start["turn"] or 1) + 1, "parent": start["candidate_id"]}
    return {name: winner.get(name) for name in CANDIDATES.names}
