"""What a person must know of a run that nevertheless went on: stages say it here, and whoever runs them gathers it.

Guarantees: a caution that is raised inside of `gathering` is in its list, once, in the order of the first mention, whatever becomes of the
stage; where nobody gathers, it is logged as a warning all the same. Holds no text of a candidate or a task: cautions are shown in reports
and notices. Stages that run in another process cannot be heard.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_lists: list[list[str]] = []
log = logging.getLogger(__name__)


def caution(text: str) -> None:
    """Tell whoever gathers, and the log."""
    log.warning("%s", text)
    for gathered in _lists:
        if text not in gathered:
            gathered.append(text)


@contextmanager
def gathering() -> Iterator[list[str]]:
    """The cautions of what is done inside the block."""
    gathered: list[str] = []
    _lists.append(gathered)
    try:
        yield gathered
    finally:
        _lists[:] = [each for each in _lists if each is not gathered]
