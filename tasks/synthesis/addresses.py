"""Which of several equal servers gets the next request.

Guarantees: it is one with the least in flight among those that work; one that failed on transport
rests for a while (1 s, doubling up to a minute with every failure after a rest), then gets one
request on trial, and is back with its first answer. Where all rest, the one whose rest ends first
is given: how long to wait is the caller's to decide. Where an owner has parked all (its servers are
starting), `take` waits until one is back, or raises what the owner reports. Safe to use from
several threads and event loops. Does not send anything.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass

FIRST_REST_S = 1.0
LONGEST_REST_S = 60.0


@dataclass(eq=False)
class Address:
    """One server, as the clients see it."""

    url: str
    in_flight: int = 0
    failures: int = 0
    """Rests in a row; 0 once it has answered."""
    rests_until: float = 0.0
    turn: int = 0
    """When it was last taken: between equals the one that has waited longest is next."""


class Addresses:
    """Some addresses, fixed (`urls`) or kept by an owner (`put`, `park`, `fail`)."""

    def __init__(
        self, urls: Iterable[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock, self._lock, self._turn = clock, threading.Lock(), 0
        self._all: dict[Hashable, Address] = {url: Address(url) for url in urls}
        self._fault: Exception | None = None
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

        self.most = len(self._all)
        """How many addresses there have been at once."""

    def __str__(self) -> str:
        return ", ".join(address.url for address in list(self._all.values())) or "the server"

    async def take(self) -> Address:
        """An address, which the caller gives back with `release`. Raises what `fail` was given."""
        while True:
            with self._lock:
                if self._fault is not None:
                    raise self._fault
                if self._all:
                    return self._choose()
                waiter = (asyncio.get_running_loop(), asyncio.get_running_loop().create_future())
                self._waiting.append(waiter)
            await waiter[1]

    def release(self, address: Address, transport_fault: bool = False) -> None:
        """A request has ended: with an answer of any kind, or (`transport_fault`) without one."""
        with self._lock:
            address.in_flight -= 1
            if not transport_fault:
                address.failures, address.rests_until = 0, 0.0
            elif self._clock() >= address.rests_until:
                # what was in flight together fails together, and counts once
                address.failures += 1
                rest_s = min(FIRST_REST_S * 2 ** (address.failures - 1), LONGEST_REST_S)
                address.rests_until = self._clock() + rest_s

    def another_ready(self, than: Address | None) -> bool:
        """Is there another address that neither rests nor is parked?"""
        with self._lock:
            return any(
                self._ready(address) for address in self._all.values() if address is not than
            )

    def put(self, key: Hashable, url: str) -> None:
        """The owner's server `key` works, at `url`. What it did before is forgotten if it was
        parked."""
        with self._lock:
            known = self._all.get(key)
            if known is None or known.url != url:
                self._all[key] = Address(url)
                self.most = max(self.most, len(self._all))
            self._wake()

    def park(self, key: Hashable) -> None:
        """The owner's server `key` does not work at the moment."""
        with self._lock:
            self._all.pop(key, None)

    def fail(self, fault: Exception) -> None:
        """No server will work any more: everybody who asks for one gets this."""
        with self._lock:
            self._fault = fault
            self._wake()

    def _choose(self) -> Address:
        every = list(self._all.values())
        ready = [address for address in every if self._ready(address)]
        if ready:
            chosen = min(ready, key=lambda each: (each.in_flight, each.turn))
        else:
            chosen = min(every, key=lambda each: (each.rests_until, each.in_flight))
        self._turn += 1
        chosen.in_flight, chosen.turn = chosen.in_flight + 1, self._turn
        return chosen

    def _ready(self, address: Address) -> bool:
        on_trial = address.failures > 0 and address.in_flight > 0
        return not on_trial and self._clock() >= address.rests_until

    def _wake(self) -> None:
        for loop, future in self._waiting:
            with suppress(RuntimeError):  # a loop that is closed has nobody waiting
                loop.call_soon_threadsafe(_settle, future)
        self._waiting.clear()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
