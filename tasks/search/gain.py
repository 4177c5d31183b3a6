"""Is a winner faster than its start? Numbers from fresh measurements of both, which the search did
not see. Pure.

The best of many noisy measurements is partly the luckiest, so the search's own number is too high
(the winner's curse). Start and winner are therefore verified `rounds` times more, in turn, each
time in a process of its own and timed in pairs with the reference. With speedups s_i of the start
and w_i of the winner, each with a 95 % interval on the log scale of half width h,

    log gain = mean(log w_i) - mean(log s_i),   se^2 = sum of (h_i / 1.96)^2 / rounds^2,

or, where that is more, the variance of log w_i - log s_i over the rounds / rounds; the interval is
gain * exp(+-1.96 se): the difference of two independent estimates on the log scale (Altman and
Bland, "Interaction revisited: the difference between two estimates", BMJ 326, 2003, p. 219). The
intervals of a verdict hold the spread between processes (kernels_eval.judge.timing.widened).
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
    """A ratio, such as a speedup, and its 95 % interval."""

    value: float
    lower: float
    upper: float


def around(log: float, se: float) -> Interval:
    """The ratio with this logarithm and the standard error of that."""
    return Interval(*(math.exp(log + side * Z * se) for side in (0, -1, 1)))


def gain_of(starts: Sequence[Interval], winners: Sequence[Interval]) -> Interval:
    """Speed of the winner / speed of the start, from as many speedups of each; the formula is
    above."""
    logs = [
        math.log(winner.value / start.value) for start, winner in zip(starts, winners, strict=True)
    ]
    rounds = len(logs)
    errors = [math.log(each.upper / each.lower) / (2 * Z) for each in (*starts, *winners)]
    spread = variance(logs) / rounds if rounds > 1 else 0.0
    squared = max(sum(error**2 for error in errors) / rounds**2, spread)
    return around(fmean(logs), math.sqrt(squared))


def mean_gain(gains: Sequence[float]) -> Interval:
    """Geometric mean over tasks, with the normal 95 % interval of the mean of logarithms."""
    logs = [math.log(gain) for gain in gains] or [0.0]
    se = math.sqrt(variance(logs) / len(logs)) if len(logs) > 1 else 0.0
    return around(fmean(logs), se)


def pair_of(population: Population) -> tuple[Member, Member] | None:
    """Start and winner; None where no start is correct, or one stayed the best."""
    start, best = population.start, population.best
    return (start, best) if start and best and best.operator != START else None


class Measurement(NamedTuple):
    """A measurement of start or winner in a round: an id of its own, its place in the order ABBA,
    and the member."""

    key: str
    place: int
    member: Member


def again(population: Population) -> Iterator[Measurement]:
    """What is to be measured once more; nothing where the start stayed the best."""
    pair = pair_of(population)
    for number in range(population.config.rounds if pair else 0):
        for place, member in enumerate((pair or ())[:: 1 - 2 * (number % 2)]):
            yield Measurement(again_id(member.candidate_id, number), 2 * number + place, member)


def again_id(candidate_id: str, number: int) -> str:
    """The id under which a candidate is measured in a round."""
    return stable_hash(["confirmation", candidate_id, number])


def result_of(population: Population, found: Mapping[str, Interval]) -> Json:
    """What the search found for one task, as plain data; `found` are the speedups measured anew by
    `again_id`, of those that were correct.

    `gain` is 1 where the start stayed the best, and None where no start is correct, or start or
    winner was not correct in every round. `searched` is the search's own number.
    """
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
    """The numbers of a search: the confirmed gain over its tasks, its costs, and its curve.

    A winner that is not confirmed to be faster is not used: its task counts with gain 1 in
    `used_gain`, while `gain` takes every confirmed number as it is. The curve is by the search's
    own verdicts, after each evaluation, a geometric mean over tasks.
    """
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
