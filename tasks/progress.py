"""How stages say how far they are, and what to be careful about. Whoever watches (terminal, Prefect
artifact) has registered for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Observer = Callable[[str, int, int, str], None]
"""(stage, done, total, note): called often; must be quick. What it raises ends the stage: a full
disk does so, and nothing else may."""

_observers: list[Observer] = []


def report(stage: str, done: int, total: int, note: str = "") -> None:
    """Tell every observer that `done` of `total` units of a stage are finished."""
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
    """What a person must know of a run that nevertheless continues. It goes to the log and to
    whoever gathers; no text of a candidate or a task belongs in it, for reports and notices show
    it."""
    log.warning("%s", text)
    for gathered in _cautions:
        if text not in gathered:
            gathered.append(text)


@contextmanager
def gathering() -> Iterator[list[str]]:
    """The cautions of what is done inside the block, each once. Stages that run in another process
    cannot be heard."""
    gathered: list[str] = []
    _cautions.append(gathered)
    try:
        yield gathered
    finally:
        _cautions[:] = [each for each in _cautions if each is not gathered]


def duration(seconds: float) -> str:
    """For a person: `45 s`, `12 min`, `3 h 20 min`, `2 d 5 h`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24} h"


def hours(value: float) -> str:
    """GPU-hours for a person."""
    digits = 1 if value >= 10 else 2 if value >= 0.1 else 4
    return f"{value:,.{digits}f} GPU-hours"
