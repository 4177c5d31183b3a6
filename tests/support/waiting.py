"""Waiting for conditions. Deadlines are generous, and count no time in which this process did not
run: no test depends on how busy the machine is, nor on whether it is suspended meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from kernels_eval.sandbox.process_tree import LookingClock

T = TypeVar("T")


def until(
    condition: Callable[[], T],
    what: str | Callable[[], str] = "the condition",
    timeout_s: float = 120.0,
    every_s: float = 0.02,
) -> T:
    """The first true answer of `condition`. Fails the test after `timeout_s` seconds."""
    clock = LookingClock()
    deadline = clock() + timeout_s
    while not (found := condition()):
        late = clock() >= deadline
        assert not late, f"not within {timeout_s:.0f} s: {what() if callable(what) else what}"
        time.sleep(every_s)
    return found


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fails the test where the block takes longer."""
    clock, over = LookingClock(), threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            clock()

    looking = threading.Thread(target=look, daemon=True)
    began = clock()
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()
    assert clock() - began < seconds, f"not within {seconds:g} s"
