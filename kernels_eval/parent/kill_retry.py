"""Who is believed when a process dies of SIGKILL that we did not send: the one place that decides
it.

A limit or a deadline of ours that is met has a verdict of its own. Any other SIGKILL comes from
outside (the machine ran out of memory, an operator, a node that goes down) or from the process
itself, and nobody can tell which. So what was under way is done again from its start; the fifth
SIGKILL of the same kind of process is believed to be the candidate's own, or the task's. That holds
for children and for compilers. The fork server runs our code only: its fifth death stays an error
of the machine.

Guarantees: no verdict rests on fewer SIGKILLs than that; who always kills itself gets its verdict
then.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from kernels_eval.errors import SandboxError

ATTEMPTS = 5
"""Where something is killed every few seconds, two in a row are soon seen, and three in a long
run."""

COMPILER_WAS_KILLED = re.compile(
    r"^(\S+: fatal error: (Killed signal terminated program|\S+ terminated with signal 9)"
    r"|nvcc error\s*: .* died due to signal 9|\S*clang\S*: error: unable to execute command:"
    r" Killed)",
    re.MULTILINE,
)
"""What drivers of compilers say of a program they started. A source that makes a compiler say it is
compiled five times, no more."""

T = TypeVar("T")


class KilledError(SandboxError):
    """A child died of SIGKILL, and nothing says that it brought it about. `role` is what it was
    there for."""

    def __init__(self, message: str, hint: str = "", role: str = "") -> None:
        super().__init__(message, hint)
        self.role = role


def until_believed(work: Callable[[frozenset[str]], T]) -> T:
    """What `work` returns. It is called again where it raises SandboxError: five times at most for
    each role, and for the fork server.

    Its argument are the roles whose SIGKILL is to be believed from now on: `work` must not raise
    KilledError for them.
    """
    deaths: Counter[str] = Counter()
    while True:
        try:
            return work(frozenset(role for role, count in deaths.items() if count >= ATTEMPTS - 1))
        except SandboxError as error:
            role = error.role if isinstance(error, KilledError) else "fork server"
            deaths[role] += 1
            if deaths[role] >= ATTEMPTS:
                raise


def was_killed(returncode: int, log: str) -> bool:
    """Was a compiler that failed, or a program that it had started, killed?"""
    return returncode == -signal.SIGKILL or (
        returncode != 0 and COMPILER_WAS_KILLED.search(log) is not None
    )
