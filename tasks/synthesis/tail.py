"""A deadline for the last requests of many.

Guarantees: no request is given up before every one has been sent and at most a set share of them is
unanswered; then those are left `wait_s` seconds more, whatever they are doing (waiting for a
server, pausing before another attempt, being answered). What has arrived by then is kept. For use
in one event loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from anyio import CancelScope, current_time


class Tail:
    """The last `share` of `count` requests, rounded down. `wait_s` None: they take what they take.
    `given_up` is how many were cancelled."""

    def __init__(self, count: int, share: float, wait_s: float | None) -> None:
        self._most, self._wait_s = int(round(share * count, 6)), wait_s
        self._unsent = self._unanswered = count
        self._in_flight: set[CancelScope] = set()
        self._begun = False
        self.given_up = 0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Send one request and take its answer inside the block, which the deadline ends early and
        silently."""
        self._unsent -= 1
        with CancelScope() as scope:
            self._in_flight.add(scope)
            try:
                self._begin_if_due()
                yield
            finally:
                self._in_flight.discard(scope)
                self._unanswered -= 1
                self._begin_if_due()
        self.given_up += scope.cancelled_caught

    def _begin_if_due(self) -> None:
        due = not self._unsent and self._unanswered <= self._most
        if self._wait_s is not None and due and not self._begun:
            self._begun, deadline = True, current_time() + self._wait_s
            for scope in self._in_flight:
                scope.deadline = deadline
