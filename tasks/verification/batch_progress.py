"""What a batch shows while it works, on stderr: a bar on a terminal, a line every ten seconds
elsewhere.

Guarantees: stdout is never written to; nothing that a candidate or a table wrote is shown, only
counts, names of our own and times; what the redrawing thread reads was copied for it under a lock.
Figures of the workers are those at the last verdict; elapsed time, and the time left with it, go on
between verdicts.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from kernels_eval.cluster.telemetry import Telemetry
from tasks.verification.batch_estimate import duration, in_words, time_left

LINE_EVERY_S = 10.0


class Watch:
    """An observer (tasks.progress) of one verification, and of the reading before it. Use as a
    context manager."""

    def __init__(self, stage: str) -> None:
        self.planned = self.reused = 0
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
        self._said_s = float("-inf")

    def __enter__(self) -> Watch:
        if sys.stderr.isatty():
            self._bar = _bar(self)
            self._bar.start()
        else:
            self._ticker = threading.Thread(target=self._tick, name="progress lines", daemon=True)
            self._ticker.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._bar:
            self._bar.stop()
        if self._ticker:
            self._ticker.join()
            if self.planned:
                self._say()  # how far it came, however it ended

    # -- what the work says ------------------------------------------------------------------------

    def plans(self, planned: int, settled: Mapping[str, int]) -> None:
        """`planned` candidates go to workers; the others have verdicts already, so many of each
        status."""
        with self._lock:
            self.planned, self.reused, self._settled = (
                planned,
                sum(settled.values()),
                Counter(settled),
            )
            self._now = (self._stage, self.reused, self.reused + planned)
        if self._ticker:
            self._say()

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
        if self._ticker and first:
            self._say()

    @property
    def reached(self) -> int:
        """Verdicts of workers so far."""
        return len(self._reached_s)

    # -- what is shown -----------------------------------------------------------------------------

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
            facts = (
                [", ".join(f"{status} {count:,}" for status, count in statuses.most_common())]
                if statuses
                else []
            )
            if self._figures:
                per_hour = (
                    left.per_hour
                    if left and left.per_hour
                    else self._figures["candidates_per_hour"]
                )
                facts += [
                    f"{per_hour:,.0f}/h",
                    f"devices {self._figures['device_busy_share']:.0%} busy",
                ]
                facts += [f"queue {self._figures['queue_depth']}"]
            return [*facts, elapsed, in_words(left, len(self._reached_s))]

    def _tick(self) -> None:
        while not self._ended.wait(LINE_EVERY_S):
            if time.monotonic() - self._said_s >= 0.9 * LINE_EVERY_S:
                self._say()

    def _say(self) -> None:
        stage, done, total = self.position()
        if not stage:
            return
        self._said_s = time.monotonic()
        print(f"{stage} {done:,}/{total:,}  {'  '.join(self.facts())}", file=sys.stderr, flush=True)


def _bar(watch: Watch) -> Any:
    """A bar that asks `watch` twice a second what it should show."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    def draw() -> Any:
        stage, done, total = watch.position()
        share = Text(f"{done:,}/{total:,} ({done / total:.0%})" if total else "")
        line = Table.grid(padding=(0, 1))
        line.add_row(
            Text(stage or "starting"),
            ProgressBar(total=total or None, completed=done, width=40, pulse=not total),
            share,
        )
        return Group(
            line, Text("  " + ", ".join(watch.facts()))
        )  # Text is shown as it is, brackets and all

    return Live(
        get_renderable=draw,
        console=Console(stderr=True),
        refresh_per_second=2,
        redirect_stdout=False,
    )
