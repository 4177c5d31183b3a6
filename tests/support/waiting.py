"""Waiting for conditions. Deadlines are generous: no test depends on how busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], what: str = "the condition", timeout_s: float = 120.0) -> T:
    """The first true answer of `condition`. Fails the test after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.02)
    return found
