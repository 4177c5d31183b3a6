"""The progress of a batch on stderr: a line per verdict; and a bar on a terminal, a line every ten
seconds elsewhere, with an estimate of the time left.

Guarantees: stdout is never written to; nothing that a candidate wrote is displayed, only counts,
statuses, times and ids of tasks; what the redrawing thread reads was copied for it under a lock.
Figures of the workers are those at the last verdict; elapsed time and time left advance between
verdicts.

Of the estimate: none is given before there is data for one; the start, which holds imports and
first builds, never counts; a batch that comes to a halt is given more time with every second. Where
the candidates to come cost more than those of the last minutes, the estimate is wrong until they
are being verified.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kernels_eval.pool.telemetry import Telemetry
from tasks.progress import duration

LINE_EVERY_S = 10.0
WINDOW_S = 600.0
RECENT_VERDICTS, ENOUGH_VERDICTS = 20, 2
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
    and `ENOUGH_S` seconds after it. Of few verdicts the range is wide, as it should be.

    The rate is n / T. T reaches from now back over `WINDOW_S` seconds, or as far as it takes to
    hold `RECENT_VERDICTS` verdicts, but not beyond the first verdict, which opens the clock and is
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
    recent_s = reached_s[-RECENT_VERDICTS - 1 :][0]
    begin_s = max(reached_s[0], min(now_s - WINDOW_S, recent_s))
    length_s = now_s - begin_s
    edges = [
        bisect_right(reached_s, begin_s + length_s * part / SLICES) for part in range(SLICES)
    ] + [len(reached_s)]
    counts = [after - before for before, after in itertools.pairwise(edges)]
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


class BatchProgress:
    """An observer (tasks.progress) of one verification, and of the reading before it. Use as a
    context manager."""

    def __init__(self, stage: str) -> None:
        self.planned = self.reused = 0
        self.verdict = ""
        """The verdict that is reported next, in one line."""
        self._stage = stage
        self._lock = threading.Lock()
        self._began_s = time.monotonic()
        self._reached_s: list[float] = []
        self._settled: Counter[str] = Counter()
        self._telemetry: Callable[[], Telemetry] | None = None
        self._figures: dict[str, Any] = {}
        self._now: tuple[str, int, int] = ("", 0, 0)
        self._bar: Any = None
        self._ended = threading.Event()
        self._ticker: threading.Thread | None = None
        self._printed_s = float("-inf")

    def __enter__(self) -> BatchProgress:
        if sys.stderr.isatty():
            self._bar = _bar(self)
            self._bar.start()
        else:
            self._ticker = threading.Thread(target=self._tick, name="progress lines", daemon=True)
            self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._bar:
            self._bar.stop()
        if self._ticker:
            self._ticker.join()
            if self.planned:
                self._print()  # how far it came, however it ended

    # -- reported by the work ----------------------------------------------------------------------

    def plans(self, planned: int, settled: Mapping[str, int]) -> None:
        """`planned` candidates go to workers; the others have verdicts already, so many of each
        status."""
        with self._lock:
            self.planned, self.reused = planned, sum(settled.values())
            self._settled = Counter(settled)
            self._now = (self._stage, self.reused, self.reused + planned)
        if self._ticker:
            self._print()

    def follow(self, telemetry: Callable[[], Telemetry]) -> None:
        """Where the figures of the workers are to be had: a pool makes a new Telemetry when it
        starts."""
        self._telemetry = telemetry

    def __call__(self, stage: str, done: int, total: int, note: str) -> None:
        first = False
        with self._lock:
            self._now = (stage, done, total)
            if stage == self._stage:
                self._reached_s.append(time.monotonic())
                first = len(self._reached_s) == 1
                if self._telemetry:
                    seen = self._telemetry()
                    self._figures = {**seen.summary(), "queue_depth": seen.queue_depth}
        if self.verdict and stage == self._stage:
            line = f"{done:>7,}/{total:,}  {self.verdict}"
            if self._bar:
                self._bar.console.print(line, markup=False, highlight=False)
            else:
                print(line, file=sys.stderr, flush=True)
        if self._ticker and first:
            self._print()

    @property
    def reached(self) -> int:
        """Verdicts of workers so far."""
        return len(self._reached_s)

    # -- what is displayed -------------------------------------------------------------------------

    def position(self) -> tuple[str, int, int]:
        """Stage, done, total."""
        with self._lock:
            return self._now

    def facts(self) -> list[str]:
        """Phrases for one or two lines: statuses, rate, devices and queue; elapsed and left."""
        with self._lock:
            stage, done, total = self._now
            now_s = time.monotonic()
            elapsed = f"{duration(now_s - self._began_s)} elapsed"
            if stage != self._stage:
                return [elapsed]
            left = time_left(self._reached_s, total - done, now_s)
            statuses = self._settled + Counter(self._figures.get("statuses", {}))
            counts = [f"{status} {count:,}" for status, count in statuses.most_common()]
            facts = [", ".join(counts)] if counts else []
            if seen := self._figures:
                rate = left.per_hour if left and left.per_hour else seen["candidates_per_hour"]
                facts.append(f"{rate:,.0f}/h")
                facts.append(f"devices {seen['device_busy_share']:.0%} busy")
                facts.append(f"queue {seen['queue_depth']}")
            return [*facts, elapsed, in_words(left, len(self._reached_s))]

    def _tick(self) -> None:
        while not self._ended.wait(LINE_EVERY_S):
            if time.monotonic() - self._printed_s >= 0.9 * LINE_EVERY_S:
                self._print()

    def _print(self) -> None:
        stage, done, total = self.position()
        if not stage:
            return
        self._printed_s = time.monotonic()
        print(f"{stage} {done:,}/{total:,}  {'  '.join(self.facts())}", file=sys.stderr, flush=True)


def _bar(progress: BatchProgress) -> Any:
    """A bar that reads `progress` twice a second."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    def draw() -> Any:
        stage, done, total = progress.position()
        share = Text(f"{done:,}/{total:,} ({done / total:.0%})" if total else "")
        line = Table.grid(padding=(0, 1))
        line.add_row(
            Text(stage or "starting"),
            ProgressBar(total=total or None, completed=done, width=40, pulse=not total),
            share,
        )
        return Group(line, Text("  " + ", ".join(progress.facts())))  # Text: no markup in it

    return Live(
        get_renderable=draw,
        console=Console(stderr=True),
        refresh_per_second=2,
        redirect_stdout=False,
    )
