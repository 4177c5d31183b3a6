"""Children that have their device ready before there is work for them, and the burial of those
whose work is done.

On a GPU a new process spends 0.3 s on its CUDA context and a killed one 0.1 s on giving back its
memory: here both happen while another candidate is compared. Guarantees: a spare comes from the
fork server as every child does and has run our code only; one that failed or was killed while it
waited costs nothing but the time saved; after `settle` nothing starts or ends, so nothing disturbs
a clock; after `buried` the memory of those that were closed is free. Does not guarantee that a
spare is there: `take` then starts a child.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from kernels_eval.config import EvalConfig
from kernels_eval.errors import SandboxError
from kernels_eval.isolation.sandbox import Child, ChildFailure, ForkServer

PREPARE_S = 60.0
WANTED = {"candidate": 2, "reference": 1}
"""Spares of each role. Two of the first, since a candidate that fails at once leaves no time to
start another."""


class Spares:
    """Spare children of each role, on one device. With `ahead` off, children start when they are
    taken and end when they are buried."""

    def __init__(self, config: EvalConfig, device: str, *, ahead: bool) -> None:
        self.config, self.device, self.ahead = config, device, ahead
        self._starting: dict[str, deque[tuple[ForkServer, Future[Child]]]] = {
            role: deque() for role in WANTED
        }
        self._burials: list[Future[None]] = []
        self._thread: ThreadPoolExecutor | None = None

    def take(
        self, server: ForkServer, role: str, exchange_bytes: int = 0, exchange: int | None = None
    ) -> Child:
        """A child of this server for that role, which returns outputs as the arguments say (see
        Child). Raises SandboxError where the fork server fails."""
        child = self._spare(server, role)
        if child is not None:
            try:
                child.exchange_through(exchange_bytes, exchange, PREPARE_S)
                return child
            except (SandboxError, ChildFailure):
                child.close()
        return Child(server, role, self.config.limits, exchange_bytes, exchange=exchange)

    def replenish(self, server: ForkServer) -> None:
        """Begin to start what is missing."""
        if self.ahead:
            for role, count in WANTED.items():
                while len(self._starting[role]) < count:
                    self._starting[role].append(
                        (server, self._later(lambda role=role: self._started(server, role)))
                    )

    def bury(self, close: Callable[[], None]) -> None:
        """Close a child, or what holds one."""
        if self.ahead:
            self._burials.append(self._later(close))
        else:
            close()

    def buried(self) -> None:
        """Wait until those that were closed have given back their memory."""
        burials, self._burials = self._burials, []
        for burial in burials:
            burial.result()

    def settle(self) -> None:
        """Wait until nothing starts or ends."""
        self.buried()
        for role, starting in self._starting.items():
            for server, _ in list(starting):
                child = self._spare(server, role)
                if child is not None:
                    starting.append((server, _done(child)))

    def close(self) -> None:
        self.buried()
        for starting in self._starting.values():
            while starting:
                with suppress(SandboxError):
                    starting.popleft()[1].result().close()

    def _spare(self, server: ForkServer, role: str) -> Child | None:
        """The oldest spare of that role, ready; None where there is none, or where it is of no use
        to this server."""
        if not self._starting[role]:
            return None
        origin, starting = self._starting[role].popleft()
        try:
            child = starting.result()
        except SandboxError:
            return None
        try:
            if origin is server and server.alive:
                if child.owed:
                    child.finish("prepare", timeout=PREPARE_S)
                if not child.gone:
                    return child
        except (SandboxError, ChildFailure):
            pass  # it was killed while it waited, or the device fails: then the next child says so
        child.close()
        return None

    def _started(self, server: ForkServer, role: str) -> Child:
        child = Child(server, role, self.config.limits)
        try:
            child.begin(
                {"command": "prepare", "device": self.device, "threads": self.config.threads}
            )
        except (SandboxError, ChildFailure) as failure:
            child.close()
            raise SandboxError(
                f"a spare {role} process did not start: {failure}",
                "one is started when it is needed",
            ) from failure
        return child

    def _later(self, work: Callable) -> Future:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "spares")
        return self._thread.submit(work)


def _done(child: Child) -> Future[Child]:
    future: Future[Child] = Future()
    future.set_result(child)
    return future
