"""Is a winner faster than its start? Fresh measurements of both, which the search did not see, and
the snapshot of what they confirm.

The best of many noisy measurements is partly the luckiest, so the search's own number is too high
(the winner's curse). Start and winner are therefore verified `rounds` times more, in turn, each
time in a process of its own and timed in pairs with the reference. With speedups s_i of the start
and w_i of the winner, each with a 95 % interval on the log scale of half width h,

    log gain = mean(log w_i) - mean(log s_i),   se^2 = sum of (h_i / 1.96)^2 / rounds^2,

and the interval is gain * exp(+-1.96 se): the difference of two independent estimates on the log
scale (Altman and Bland, "Interaction revisited: the difference between two estimates", BMJ 326,
2003, p. 219). The intervals of a verdict hold the spread between processes
(kernels_eval.checks.timing.widened).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from kernels_eval.records import Candidate, stable_hash
from tasks.search.population import START, Population
from tasks.search.stage import Row, Search
from tasks.store import Snapshot, SnapshotRef, fingerprint
from tasks.tables import CANDIDATES
from tasks.versions import SEARCH_VERSION

CONFIRMATION, IMPROVED = "search-confirmation", "improved"
Z = 1.96
"""Of a two-sided 95 % interval of a normal distribution."""
NOTABLE = 1.05
"""A gain above this counts in `share_above_5_percent`."""


class Measured(NamedTuple):
    """A speedup against the reference, with its 95 % interval."""

    speedup: float
    lower: float
    upper: float

    @property
    def se(self) -> float:
        return math.log(self.upper / self.lower) / (2 * Z)


class Interval(NamedTuple):
    """A ratio and its 95 % interval."""

    value: float
    lower: float
    upper: float


def gain_of(starts: Sequence[Measured], winners: Sequence[Measured]) -> Interval:
    """Speed of the winner / speed of the start, from as many measurements of each; the formula is
    above."""
    logs = [fmean(math.log(each.speedup) for each in group) for group in (starts, winners)]
    variance = sum(each.se**2 / len(group) ** 2 for group in (starts, winners) for each in group)
    gain, wide = logs[1] - logs[0], Z * math.sqrt(variance)
    return Interval(*map(math.exp, (gain, gain - wide, gain + wide)))


def mean_gain(gains: Sequence[float]) -> Interval:
    """Geometric mean over tasks, with the normal 95 % interval of the mean of logarithms."""
    logs = [math.log(gain) for gain in gains] or [0.0]
    middle = fmean(logs)
    wide = Z * stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
    return Interval(*map(math.exp, (middle, middle - wide, middle + wide)))


# -- fresh measurements ----------------------------------------------------------------------------


def again(population: Population) -> Iterator[dict[str, Any]]:
    """Rows of candidates that measure start and winner of a task once more, in the order ABBA; none
    where the start is the best."""
    start, best = population.start, population.best
    if start is None or best is None or best.operator == START:
        return
    for number in range(population.config.rounds):
        pair = (start, best) if number % 2 == 0 else (best, start)
        for place, member in enumerate(pair):
            row = Candidate(
                candidate_id=again_id(member.candidate_id, number),
                task_id=population.task_id,
                language=population.language,
                generator="search: confirmation",
                sample_index=2 * number + place,
                code=member.code,
            )
            yield row.model_dump(mode="json") | {"request_key": row.candidate_id}


def again_id(candidate_id: str, number: int) -> str:
    """The id under which a candidate is measured in a round."""
    return stable_hash(["confirmation", candidate_id, number])


def confirmation(search: Search) -> SnapshotRef:
    """A finished snapshot of tasks.tables.CANDIDATES: what is to be measured again."""
    name = fingerprint(CONFIRMATION, {}, [search.snapshot.fingerprint], SEARCH_VERSION)
    snapshot = Snapshot(search.snapshot.root, CONFIRMATION, name)
    if not snapshot.finished:
        rows = [row for each in search.populations.values() for row in again(each)]
        there = snapshot.keys("candidate_id")
        snapshot.append((row for row in rows if row["candidate_id"] not in there), CANDIDATES)
        upstream = [search.snapshot.fingerprint]
        snapshot.publish(config=search.config, upstream=upstream, rows=len(rows))
    return snapshot.ref


def measured(verdicts: Snapshot) -> dict[str, Measured]:
    """What was measured anew, by the candidate's id there; those that are not correct lack."""
    fields = ("speedup", "speedup_lower", "speedup_upper")
    columns = ["candidate_id", *(f"timing.{name}" for name in fields)]
    rows = verdicts.read(columns=columns, unique="candidate_id").to_dicts()
    return {
        row["candidate_id"]: Measured(*(row[name] for name in fields))
        for row in rows
        if row["speedup"]
    }


def result_of(population: Population, found: Mapping[str, Measured]) -> dict[str, Any]:
    """What the search found for one task, as plain data. `gain` is 1 where the start stayed the
    best, and None where the winner, or the start, was not correct in every round."""
    start, best, rounds = population.start, population.best, population.config.rounds
    told: dict[str, Any] = {
        "task_id": population.task_id,
        "start": start and start.candidate_id,
        "winner": None,
        "searched": population.curve()[-1],
        "gain": 1.0 if start else None,
        "gain_lower": None,
        "gain_upper": None,
        "improved": False,
        "evaluations": population.evaluations,
        "device_s": sum(each.device_s for each in population.members.values()),
        "lineage": [],
    }
    if start is None or best is None or best.operator == START:
        return told
    told |= {"winner": best.candidate_id, "lineage": lineage_of(population)}
    groups = [
        [
            found[key]
            for key in (again_id(each.candidate_id, n) for n in range(rounds))
            if key in found
        ]
        for each in (start, best)
    ]
    if min(map(len, groups)) < rounds:
        return told | {"gain": None}
    gain = gain_of(*groups)
    bounds = {"gain_lower": gain.lower, "gain_upper": gain.upper}
    return told | {"gain": gain.value, "improved": gain.lower > 1} | bounds


def lineage_of(population: Population) -> list[dict[str, Any]]:
    """From a start to the winner: what was done, and the speedup by the search's own verdict."""
    best = population.best
    return [
        {
            "step": each.step,
            "operator": each.operator,
            "change": each.change,
            "speedup": each.score,
            "candidate_id": each.candidate_id,
        }
        for each in (population.lineage(best) if best else ())
    ]


def summary_of(results: Sequence[Mapping[str, Any]], search: Search) -> dict[str, Any]:
    """The numbers of a search: the confirmed gain over its tasks, its costs, and its curve.

    A winner that is not confirmed to be faster is not used: its task counts with gain 1 in
    `used_gain`, while `gain` takes every confirmed number as it is. The curve is by the search's
    own verdicts, after each evaluation, a geometric mean over tasks.
    """
    known = [result["gain"] for result in results if result["gain"] is not None]
    used = [result["gain"] if result["improved"] else 1.0 for result in results if result["start"]]
    curves = [each.curve() for each in search.populations.values() if each.start]
    return {
        "method": search.config.method,
        "operators": list(search.config.operators),
        "tasks": len(results),
        "gain": mean_gain(known)._asdict(),
        "used_gain": mean_gain(used)._asdict(),
        "improved": sum(result["improved"] for result in results),
        "share_above_5_percent": fmean([gain > NOTABLE for gain in known] or [0]),
        "evaluations": search.evaluations,
        "device_s": round(search.device_s(), 1),
        "curve": [mean_gain(column).value for column in zip(*curves, strict=True)],
        "results": list(results),
    }


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
    turns = (
        {**row, "turn": row.get("turn") or 1, "parent": row.get("parent")}
        for row in source.rows_of(left)
    )
    snapshot.append(turns, CANDIDATES)
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
