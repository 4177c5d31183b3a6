"""The snapshots behind a confirmed gain: what is measured again, and the candidates with their
confirmed winners. The numbers are those of `tasks.search.gain`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kernels_eval.records import Candidate
from tasks.search.gain import Interval, again, result_of, summary_of
from tasks.search.stage import Row, Search, in_turn
from tasks.store import Snapshot, SnapshotRef, fingerprint
from tasks.tables import CANDIDATES
from tasks.versions import SEARCH_VERSION

CONFIRMATION, IMPROVED = "search-confirmation", "improved"


def confirmation(search: Search) -> SnapshotRef:
    """A finished snapshot of tasks.tables.CANDIDATES: what is to be measured again."""
    upstream = [search.snapshot.fingerprint]
    name = fingerprint(CONFIRMATION, {}, upstream, SEARCH_VERSION)
    snapshot = Snapshot(search.snapshot.root, CONFIRMATION, name)
    if not snapshot.finished:
        there = snapshot.keys("candidate_id")
        rows = [
            Candidate(
                candidate_id=key,
                task_id=population.task_id,
                language=search.language,
                generator="search: confirmation",
                sample_index=place,
                code=member.code,
            ).model_dump(mode="json")
            for population in search.populations.values()
            for key, place, member in again(population)
        ]
        snapshot.append((row for row in rows if row["candidate_id"] not in there), CANDIDATES)
        snapshot.publish(config=search.config, upstream=upstream, rows=len(rows))
    return snapshot.ref


def told_of(search: Search, fresh: Snapshot) -> dict[str, Any]:
    """The summary of a search (`gain.summary_of`) by its confirming verdicts."""
    fields = ("speedup", "speedup_lower", "speedup_upper")
    rows = fresh.read(columns=["candidate_id", *(f"timing.{name}" for name in fields)]).rows()
    found = {name: Interval(*numbers) for name, *numbers in rows if None not in numbers}
    results = [result_of(each, found) for each in search.populations.values()]
    asked = {"method": search.config.method, "operators": list(search.config.operators)}
    return asked | summary_of(results, search.populations.values())


# -- samples of a later turn -----------------------------------------------------------------------


def improved(
    search: Search, candidates: SnapshotRef, fresh: SnapshotRef, summary: Mapping[str, Any]
) -> SnapshotRef:
    """A finished snapshot of tasks.tables.CANDIDATES: the candidates that were searched among, and
    each confirmed winner as a sample of a later turn, whose parent is its start. `fresh` is the
    snapshot of confirming verdicts; the manifest's `search` is `summary`."""
    upstream = [candidates.fingerprint, search.snapshot.fingerprint, fresh.fingerprint]
    name = fingerprint(IMPROVED, {}, upstream, SEARCH_VERSION)
    snapshot = Snapshot(candidates.root, IMPROVED, name)
    if snapshot.finished:
        return snapshot.ref
    source = candidates.open()
    every = source.index(["candidate_id"]).unique("candidate_id", keep="first", maintain_order=True)
    there = snapshot.index(["candidate_id"])
    left = every.join(there, on="candidate_id", how="anti", maintain_order="left")
    snapshot.append(map(in_turn, source.rows_of(left)), CANDIDATES)
    won = list(_winners(search, summary["results"]))
    ids = snapshot.keys("candidate_id")
    snapshot.append((row for row in won if row["candidate_id"] not in ids), CANDIDATES)
    rows = len(snapshot.keys("candidate_id"))
    return snapshot.publish(
        config=search.config, upstream=upstream, rows=rows, extra={"search": summary}
    ).ref


def _winners(search: Search, results: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of confirmed winners. One that no model wrote has the reasoning of the nearest
    ancestor that one did, and an answer with its own module."""
    wanted = {each["candidate_id"] for result in results for each in result["lineage"]}
    index = search.snapshot.index(["candidate_id"])
    places = index.filter(index["candidate_id"].is_in(list(wanted)))
    rows = {row["candidate_id"]: row for row in search.snapshot.rows_of(places)}
    for result in results:
        if result["improved"]:
            line = [rows[each["candidate_id"]] for each in result["lineage"]]
            yield with_reasoning(line)


def with_reasoning(line: Sequence[Row]) -> dict[str, Any]:
    """The winner of a lineage (start first) as a sample of a later turn."""
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
