"""Repeat requests to a service until it is back. Only errors that `is_absent` accepts are retried;
after the deadline the last error is raised."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

DEADLINE_S = 180.0
"""A supervisor restarts a service within half a minute, on a busy machine within two."""
INTERVAL_S = 1.0


def retry_until_back(
    ask: Callable[[], T],
    *,
    service: str,
    is_absent: Callable[[Exception], bool],
    log: Callable[[str], None] = lambda line: None,
    deadline_s: float = DEADLINE_S,
) -> T:
    """Return what `ask` returns, calling it every second while the service is absent, `deadline_s`
    seconds at most.

    `ask` must be idempotent. `service` is its name and address to log. `is_absent`: whether an
    error means no answer rather than a refusal. Raises the last error of `ask`.
    """
    deadline: float | None = None
    while True:
        try:
            return ask()
        except Exception as error:
            if not is_absent(error):
                raise
            if deadline is None:
                deadline = time.monotonic() + deadline_s
                log(f"{service} does not answer; retrying for up to {deadline_s:.0f} s")
            if time.monotonic() >= deadline:
                raise
        time.sleep(INTERVAL_S)
