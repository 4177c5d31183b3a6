"""Ask a service again until it is back.

Guarantees: only what `is_absent` calls an absence is asked for again, any other error is raised at
once; the absence is logged once; after the deadline the last error is raised. Does not guarantee
that the request is made exactly once: `ask` must leave the same behind however often it is called.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

DEADLINE_S = 180.0
"""What keeps a service alive starts it again within half a minute, on a busy machine within two."""
INTERVAL_S = 1.0


def retry_until_back(
    ask: Callable[[], T],
    *,
    service: str,
    is_absent: Callable[[Exception], bool],
    log: Callable[[str], None] = lambda line: None,
    deadline_s: float = DEADLINE_S,
) -> T:
    """Return what `ask` returns, calling it every second while the service is absent.

    Args:
        ask: makes one request; may be called any number of times
        service: name and address, for the log line: "MLflow at http://localhost:5000"
        is_absent: does this error mean that the service does not answer (and not that it refuses)?
        log: receives one line when the wait begins
        deadline_s: seconds after the first absence from which no further attempt is made

    Raises:
        Exception: the last error of `ask`, where it is no absence or the deadline has passed.
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
