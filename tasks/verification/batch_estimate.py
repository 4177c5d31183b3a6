"""How long a batch still takes, from when its verdicts were reached. Pure: times in, an estimate
with its range out, or None.

Guarantees: no number before there is something to base one on; the start, which holds imports and
first builds, never counts; a batch that comes to a halt is given more time, not less, with every
second. Does not know what is left: where the candidates to come cost more than those of the last
minutes (another task, another kind of failure), the estimate is wrong until they are being
verified.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.progress import duration as duration

WINDOW_S = 600.0
ENOUGH_VERDICTS = 20
ENOUGH_S = 30.0
SLICES = 10
DEVIATIONS = 1.64
"""Two-sided 90 % of a normal distribution."""


@dataclass(frozen=True)
class TimeLeft:
    """About `about_s` seconds, and with 90 % probability between `low_s` and `high_s`, if it goes
    on as in the last minutes."""

    about_s: float
    low_s: float
    high_s: float
    per_hour: float
    """Verdicts of workers in an hour, at the rate that the estimate uses."""


def time_left(reached_s: Sequence[float], left: int, now_s: float) -> TimeLeft | None:
    """What `left` candidates still take, after workers reached verdicts at the ascending times
    `reached_s`. All times in seconds.

    Neither counts candidates that need no worker: those without code, and those whose verdict is
    reused. None where it is not known yet: before `ENOUGH_VERDICTS` verdicts after the first one,
    and `ENOUGH_S` seconds after it.

    The rate is n / T. T reaches from now back over `WINDOW_S` seconds, or as far as it takes to
    hold `ENOUGH_VERDICTS` verdicts, but not beyond the first verdict, which opens the clock and is
    not counted; n is the number of verdicts in T. About left / rate remain.

    The range is that time divided and multiplied by exp(1.64 sqrt(d (1/n + 1/left))): the error of
    a rate that was counted, and of the count to come, if verdicts arrived as a Poisson process with
    `d` times its variance. d is the variance of the counts in ten equal slices of T over their
    mean, at least 1: verdicts that come in bursts are a worse ground than verdicts that come
    evenly.
    """
    if left <= 0:
        return TimeLeft(0.0, 0.0, 0.0, 0.0)
    if len(reached_s) <= ENOUGH_VERDICTS or now_s - reached_s[0] < ENOUGH_S:
        return None
    begin_s = max(reached_s[0], min(now_s - WINDOW_S, reached_s[-ENOUGH_VERDICTS - 1]))
    length_s = now_s - begin_s
    edges = [
        bisect_right(reached_s, begin_s + length_s * part / SLICES) for part in range(SLICES)
    ] + [len(reached_s)]
    counts = [after - before for before, after in zip(edges, edges[1:], strict=False)]
    reached = sum(counts)
    if not reached:
        return None  # all at one moment
    mean = reached / SLICES
    variance = sum((count - mean) ** 2 for count in counts) / (SLICES - 1)
    spread = math.exp(DEVIATIONS * math.sqrt(max(1.0, variance / mean) * (1 / reached + 1 / left)))
    about_s = left * length_s / reached
    return TimeLeft(about_s, about_s / spread, about_s * spread, 3600 * reached / length_s)


def in_words(estimate: TimeLeft | None, reached: int) -> str:
    """One phrase for a progress line: `about 12 min left (9 min to 16 min)`, or what is still
    missing for one."""
    if estimate is None:
        return (
            f"time left unknown (needs {ENOUGH_VERDICTS + 1} new verdicts over {ENOUGH_S:.0f} s,"
            f" has {reached})"
        )
    if not estimate.about_s:
        return "nothing left"
    return (
        f"about {duration(estimate.about_s)} left ({duration(estimate.low_s)} to"
        f" {duration(estimate.high_s)})"
    )
