"""One rule for processes killed by SIGKILL while a candidate is under way: its work is retried.
After a role's fifth death, its next is the candidate's. The last death of a fork server, worker or
device is an error. The pool or `Evaluator` applies this; nothing below retries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from kernels_eval.errors import GpuLostError, KilledError, SandboxError

COMPILER, FORK_SERVER, WORKER, DEVICE = "compiler", "fork server", "worker", "device"
"""Roles beside those of children."""
DEATHS = 5
"""On a machine that kills often, two deaths in a row come soon, three in a long run."""
OF_THE_MACHINE = {FORK_SERVER: DEATHS, WORKER: DEATHS, DEVICE: 3}
"""How often each may die while one candidate is under way."""
BLAMED_ROLES: ContextVar[frozenset[str]] = ContextVar("BLAMED_ROLES", default=frozenset())
"""Roles to blame for a SIGKILL in the current attempt."""

T = TypeVar("T")


def role_of(fault: SandboxError | GpuLostError) -> str:
    if isinstance(fault, GpuLostError):
        return DEVICE
    return fault.role if isinstance(fault, KilledError) else FORK_SERVER


class Deaths:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def note(self, role: str) -> bool:
        """Count a death. Returns whether the machine is to blame: then nothing is retried."""
        self.counts[role] += 1
        return role in OF_THE_MACHINE and self.counts[role] >= OF_THE_MACHINE[role]

    @property
    def blamed(self) -> frozenset[str]:
        """The roles whose next death is the candidate's."""
        often = (role for role, count in self.counts.items() if count >= DEATHS - 1)
        return frozenset(often) - OF_THE_MACHINE.keys()


@contextmanager
def blaming(roles: frozenset[str]) -> Iterator[None]:
    before = BLAMED_ROLES.set(roles)
    try:
        yield
    finally:
        BLAMED_ROLES.reset(before)


def retried(work: Callable[[], T]) -> T:
    """The result of `work()`, retried as the rule says. Raises SandboxError where the machine is to
    blame.
    """
    deaths = Deaths()
    while True:
        try:
            with blaming(deaths.blamed):
                return work()
        except SandboxError as fault:
            if deaths.note(role_of(fault)):
                raise
