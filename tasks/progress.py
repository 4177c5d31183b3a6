"""Progress and cautions of stages, for registered observers (terminal, Prefect artifact)."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

Observer = Callable[[str, int, int, str], None]
"""(stage, done, total, note): called often, so must be quick. An exception ends the stage; only a
full disk may raise one."""

_observers: list[Observer] = []
part_of_run: ContextVar[str] = ContextVar("concur_part_of_run", default="")
"""Put before the names of stages that parts of one run go through side by side."""


def report(stage: str, done: int, total: int, note: str = "") -> None:
    stage = _of_part(stage)
    for observer in list(_observers):
        observer(stage, done, total, note)


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    if not _observers:
        _ahead.clear()  # what an earlier run told
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def _of_part(stage: str) -> str:
    return f"{part_of_run.get()} {stage}".lstrip()


# -- time left -------------------------------------------------------------------------------------

RATE_OVER_S = 600.0
"""Seconds whose units tell how fast a stage goes now."""
FEWEST_UNITS = 3
"""Units that tell it, after the first, which waits for workers; and the weight of a stage alike."""


class Ahead(NamedTuple):
    """What follows a stage: `words`, and `units` of its own that it takes as long as. Each unit of
    the stage takes `times` as long as one of the stage `like`."""

    words: str
    units: float = 0.0
    like: str = ""
    times: float = 1.0


_ahead: dict[str, Ahead] = {}


def expect(stage: str, ahead: Ahead) -> None:
    """Tell those who show progress what follows a stage; replaces what was told before."""
    _ahead[_of_part(stage)] = ahead._replace(like=_of_part(ahead.like) if ahead.like else "")


class Pace:
    """How fast the stages of a run go, and how long they and what follows them still take."""

    def __init__(self) -> None:
        self._seen: defaultdict[str, deque[tuple[float, int]]] = defaultdict(deque)
        """by stage: when it had done how much, without the first report"""
        self._begun: dict[str, int] = {}

    def note(self, stage: str, done: int, now: float) -> None:
        seen, first = self._seen[stage], self._begun.setdefault(stage, done)
        if done < (seen[-1][1] if seen else first):  # the stage began again
            seen.clear()
            self._begun[stage] = done
        elif done > (seen[-1][1] if seen else first):
            seen.append((now, done))
        while len(seen) > 1 + FEWEST_UNITS and now - seen[0][0] > RATE_OVER_S:
            seen.popleft()

    def has_advanced(self, stage: str) -> bool:
        return bool(self._seen[stage])

    def words(self, stage: str, done: int, total: int, now: float) -> str:
        """A phrase for a card: `verification: 40 of 60, then 9 to confirm, 7 min or more left`."""
        if not total:
            return stage
        ahead, left = _ahead.get(stage, Ahead("")), self._left_s(stage, done, total, now)
        said = [f"{stage}: {done:,} of {total:,}", ahead.words]
        least = " or more" if ahead.words else ""  # how many follow is a guess
        said.append(f"{duration(left)}{least} left" if left else "")
        return ", ".join(filter(None, said))

    def _left_s(self, stage: str, done: int, total: int, now: float) -> float:
        each = self._seconds_each(stage)
        ahead = _ahead.get(stage, Ahead("")).units
        begun = min(each, now - self._seen[stage][-1][0]) if self._seen[stage] else 0.0
        under_way = begun if done < total else 0.0
        return each * (total - done + ahead) - under_way

    def _seconds_each(self, stage: str) -> float:
        """Seconds of a unit; 0 where unknown."""
        seen, ahead = self._seen[stage], _ahead.get(stage, Ahead(""))
        counted = seen[-1][1] - seen[0][1] if seen else 0
        passed = seen[-1][0] - seen[0][0] if seen else 0.0
        if alike := ahead.like and self._seconds_each(ahead.like):
            return (FEWEST_UNITS * ahead.times * alike + passed) / (FEWEST_UNITS + counted)
        return passed / counted if counted >= FEWEST_UNITS else 0.0


# -- cautions --------------------------------------------------------------------------------------

_cautions: list[list[str]] = []
log = logging.getLogger(__name__)


def caution(text: str) -> None:
    """Log a warning about a run that continues, and add it to `gathering`. Give no text of a
    candidate or task: reports show it."""
    log.warning("%s", text)
    for gathered in _cautions:
        if text not in gathered:
            gathered.append(text)


@contextmanager
def gathering() -> Iterator[list[str]]:
    """Collect the block's cautions, each once; those of other processes are not heard."""
    gathered: list[str] = []
    _cautions.append(gathered)
    try:
        yield gathered
    finally:
        _cautions[:] = [each for each in _cautions if each is not gathered]


def duration(seconds: float) -> str:
    """As `45 s`, `12 min`, `3 h 20 min`, `2 d 5 h`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24} h"
