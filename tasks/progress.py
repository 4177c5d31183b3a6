"""Progress and cautions of stages, for registered observers (terminal, Prefect artifact)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Observer = Callable[[str, int, int, str], None]
"""(stage, done, total, note): called often, so must be quick. An exception ends the stage; only a
full disk may raise one."""

_observers: list[Observer] = []
part_of_run: ContextVar[str] = ContextVar("concur_part_of_run", default="")
"""Put before the names of stages that parts of one run go through side by side."""


def report(stage: str, done: int, total: int, note: str = "") -> None:
    stage = f"{part_of_run.get()} {stage}".lstrip()
    for observer in list(_observers):
        observer(stage, done, total, note)


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


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
