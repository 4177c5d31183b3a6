"""A winner's gain over its start, from fresh measurements of both.

The best of noisy measurements is partly luck. Both are therefore verified `rounds` more times, in
turn, each in its own process. With speedups s_i of the start and w_i of the winner, each with a 95
% interval of half width h on the log scale,

    log gain = mean(log w_i) - mean(log s_i),   se^2 = sum of (h_i / 1.96)^2 / rounds^2,

or, if larger, the variance of log w_i - log s_i over the rounds / rounds; the interval is gain *
exp(+-1.96 se) (Altman and Bland, BMJ 326, 2003, p. 219).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import fmean, variance
from typing import NamedTuple

from kernels_eval.records import Json, Row, stable_hash
from tasks.search.population import START, Member, Population

Z = 1.96
"""Of a two-sided 95 % interval of a normal distribution."""
NOTABLE = 1.05
"""A gain above this counts in `share_above_5_percent`."""


class Interval(NamedTuple):
    """A ratio (a speedup) and its 95 % interval."""

    value: float
    lower: float
    upper: float


def around(log: float, se: float) -> Interval:
    """The ratio with this logarithm and its standard error."""
    return Interval(*(math.exp(log + side * Z * se) for side in (0, -1, 1)))


def gain_of(starts: Sequence[Interval], winners: Sequence[Interval]) -> Interval:
    logs = [
        math.log(winner.value / start.value) for start, winner in zip(starts, winners, strict=True)
    ]
    rounds = len(logs)
    errors = [math.log(each.upper / each.lower) / (2 * Z) for each in (*starts, *winners)]
    spread = variance(logs) / rounds if rounds > 1 else 0.0
    squared = max(sum(error**2 for error in errors) / rounds**2, spread)
    return around(fmean(logs), math.sqrt(squared))


def mean_gain(gains: Sequence[float]) -> Interval:
    """Geometric mean over tasks, with the normal 95 % interval of mean logarithms."""
    logs = [math.log(gain) for gain in gains] or [0.0]
    se = math.sqrt(variance(logs) / len(logs)) if len(logs) > 1 else 0.0
    return around(fmean(logs), se)


def pair_of(population: Population) -> tuple[Member, Member] | None:
    start, best = population.start, population.best
    return (start, best) if start and best and best.operator != START else None


class Measurement(NamedTuple):
    """A start's or winner's measurement in a round: its id, its place in the order ABBA, and the
    member."""

    key: str
    place: int
    member: Member


def again(population: Population) -> Iterator[Measurement]:
    """What to measure again; nothing where the start won."""
    pair = pair_of(population)
    for number in range(population.config.rounds if pair else 0):
        for place, member in enumerate((pair or ())[:: 1 - 2 * (number % 2)]):
            yield Measurement(again_id(member.candidate_id, number), 2 * number + place, member)


def again_id(candidate_id: str, number: int) -> str:
    """A candidate's id in a measuring round."""
    return stable_hash(["confirmation", candidate_id, number])


def result_of(population: Population, found: Mapping[str, Interval]) -> Json:
    """A task's search result as plain data; `found` are correct remeasured speedups by `again_id`.
    `gain` is 1 where the start won, and None where start or winner failed."""
    pair, start = pair_of(population), population.start
    told: Json = {
        "task_id": population.task.task_id,
        "start": start and start.candidate_id,
        "winner": pair and pair[1].candidate_id,
        "searched": population.curve()[-1],
        **dict.fromkeys(("gain", "gain_lower", "gain_upper"), None if pair or not start else 1.0),
        "improved": False,
        "evaluations": population.evaluations,
        "device_s": sum(each.device_s for each in population.members.values()),
        "lineage": [
            {"candidate_id": each.candidate_id, "speedup": each.score}
            | {"step": each.step, "operator": each.operator, "change": each.change}
            for each in (population.lineage(pair[1]) if pair else ())
        ],
    }
    rounds = range(population.config.rounds)
    ids = [[again_id(member.candidate_id, number) for number in rounds] for member in pair or ()]
    if not ids or not all(key in found for group in ids for key in group):
        return told
    gain = gain_of(*([found[key] for key in group] for group in ids))
    bounds = {"gain_lower": gain.lower, "gain_upper": gain.upper}
    return told | {"gain": gain.value, "improved": gain.lower > 1} | bounds


def summary_of(results: Sequence[Row], populations: Collection[Population]) -> Json:
    """A search's confirmed gain over tasks, its costs and its curve (geometric mean over tasks
    after each evaluation). `used_gain` counts unconfirmed winners as 1; `gain` takes the confirmed
    numbers as they are."""
    known = [result["gain"] for result in results if result["gain"] is not None]
    used = [result["gain"] if result["improved"] else 1.0 for result in results if result["start"]]
    curves = [each.curve() for each in populations if each.start]
    return {
        "tasks": len(results),
        "gain": mean_gain(known)._asdict(),
        "used_gain": mean_gain(used)._asdict(),
        "improved": sum(result["improved"] for result in results),
        "share_above_5_percent": fmean([gain > NOTABLE for gain in known] or [0]),
        "evaluations": sum(result["evaluations"] for result in results),
        "device_s": round(sum(result["device_s"] for result in results), 1),
        "curve": [mean_gain(column).value for column in zip(*curves, strict=True)],
        "results": list(results),
    }
