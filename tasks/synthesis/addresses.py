"""Which of several equal servers gets the next request, and whether one that has requests in flight
is still there.

Guarantees: the next request goes to a server with the least in flight among those that work; one
that failed on transport rests for a while (1 s, doubling up to a minute with every failure after a
rest), then gets one request on trial, and is back with its first answer. Where all rest, the one
whose rest ends first is given: how long to wait is the caller's decision. Where an owner has parked
all (its servers are starting), `take` waits until one is back, or raises what the owner reports.
Safe to use from several threads and event loops.

A long answer and a dead server look alike for an hour: `Pulse` asks every address that has requests
in flight for its models now and then. Any answer, an error too, is a sign of life; where `MISSES`
questions in a row get none, the requests in flight there time out.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0
PARKED_S = 0.1
"""Between two looks for a server that an owner has put back."""
EVERY_S, PATIENCE_S, MISSES = 60.0, 20.0, 3
"""Of a pulse: seconds between questions, seconds to answer one, misses in a row."""
log = logging.getLogger(__name__)


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
        self.most = len(self._all)
        """How many addresses there have been at once."""

    def __str__(self) -> str:
        return ", ".join(address.url for address in list(self._all.values())) or "the server"

    async def take(self) -> Address:
        """An address, which the caller gives back with `release`. Raises what `fail` was given."""
        while (chosen := self._choose()) is None:
            await asyncio.sleep(PARKED_S)
        return chosen

    def _choose(self) -> Address | None:
        with self._lock:
            if self._fault is not None:
                raise self._fault
            every = list(self._all.values())
            if not every:
                return None
            if ready := [address for address in every if self._ready(address)]:
                chosen = min(ready, key=lambda each: (each.in_flight, each.turn))
            else:
                chosen = min(every, key=lambda each: (each.rests_until, each.in_flight))
            self._turn += 1
            chosen.in_flight, chosen.turn = chosen.in_flight + 1, self._turn
            return chosen

    def release(self, address: Address, transport_fault: bool = False) -> None:
        """The request has ended: with an answer of any kind, or (`transport_fault`) without one."""
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
            return any(self._ready(each) for each in self._all.values() if each is not than)

    def _ready(self, address: Address) -> bool:
        on_trial = address.failures > 0 and address.in_flight > 0
        return not on_trial and self._clock() >= address.rests_until

    def put(self, key: Hashable, url: str) -> None:
        """The owner's server `key` works, at `url`. Its past is forgotten if it was parked."""
        with self._lock:
            if key not in self._all or self._all[key].url != url:
                self._all[key] = Address(url)
                self.most = max(self.most, len(self._all))

    def park(self, key: Hashable) -> None:
        """The owner's server `key` does not work at the moment."""
        with self._lock:
            self._all.pop(key, None)

    def fail(self, fault: Exception) -> None:
        """No server will work any more: every caller of `take` gets this."""
        with self._lock:
            self._fault = fault


class Pulse:
    """Signs of life of all addresses that one client asks; `watch` runs beside its requests."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._limits: defaultdict[str, set[asyncio.Timeout]] = defaultdict(set)
        self._misses: Counter[str] = Counter()

    @asynccontextmanager
    async def limit(self, url: str, timeout_s: float) -> AsyncIterator[None]:
        """Raise TimeoutError where the block takes longer, or its address shows no sign of life."""
        async with asyncio.timeout(timeout_s) as limit:
            self._limits[url].add(limit)
            try:
                yield
                self._misses[url] = 0
            finally:
                self._limits[url].discard(limit)

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            await asyncio.gather(*(self._ask(url) for url in list(self._limits)))

    async def _ask(self, url: str) -> None:
        if not self._limits[url]:
            return
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._client.get(f"{url}/models")
            self._misses[url] = 0
        except (httpx.TransportError, TimeoutError):
            self._misses[url] += 1
        except Exception:  # an answer of any other kind is a sign of life
            self._misses[url] = 0
        if self._misses[url] >= MISSES:
            self._misses[url] = 0
            log.warning("%s does not answer: it gets no requests for now", url)
            for limit in self._limits[url]:
                limit.reschedule(asyncio.get_running_loop().time())
