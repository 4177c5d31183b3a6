"""Repeats the work of a process that was killed from outside: the one place that decides whether a
SIGKILL is blamed on the process that died of it.

A limit or a deadline of ours that is met has a verdict of its own. Any other SIGKILL comes from
outside (the machine ran out of memory, an operator, a node that goes down) or from the process
itself, and the parent cannot tell which. So the work is repeated from its start; the fifth SIGKILL
of the same kind of process is blamed on the candidate, or on the task. That holds for children and
for compilers. The fork server runs our code only: its fifth death stays an error of the machine.

Guarantees: no verdict rests on fewer SIGKILLs than that; a candidate that always kills itself gets
its verdict then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from kernels_eval.errors import KILL_ATTEMPTS, KilledError, SandboxError
from kernels_eval.isolation.sandbox import BLAMED_ROLES

T = TypeVar("T")


def retry_killed(work: Callable[[], T]) -> T:
    """Call `work()` until it returns, and return its result. From the fifth SIGKILL of a role on,
    that role is among `BLAMED_ROLES` meanwhile.

    Raises SandboxError at the fifth death of the fork server.
    """
    deaths: Counter[str] = Counter()
    while True:
        blamed = frozenset(role for role, count in deaths.items() if count >= KILL_ATTEMPTS - 1)
        before = BLAMED_ROLES.set(blamed)
        try:
            return work()
        except SandboxError as error:
            role = error.role if isinstance(error, KilledError) else "fork server"
            deaths[role] += 1
            if deaths[role] >= KILL_ATTEMPTS:
                raise
        finally:
            BLAMED_ROLES.reset(before)
