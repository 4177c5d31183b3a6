"""Who is believed when a process dies of SIGKILL that we did not send: the one place that decides it.

A limit or a deadline of ours that is met has a verdict of its own. Any other SIGKILL comes from outside (the machine ran out of memory, an
operator, a node that goes down) or from the process itself, and nobody can tell which. So what was under way is done again from its
start, twice; the third SIGKILL is the candidate's own, or the task's. That holds for children, for compilers, and for the fork server,
which runs our code only: its third death stays an error of the machine.

Guarantees: no verdict rests on one SIGKILL; who always kills itself gets its verdict at the third.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from typing import TypeVar

from kernels_eval.errors import SandboxError

ATTEMPTS = 3

COMPILER_WAS_KILLED = re.compile(
    r"^(\S+: fatal error: (Killed signal terminated program|\S+ terminated with signal 9)"
    r"|nvcc error\s*: .* died due to signal 9|\S*clang\S*: error: unable to execute command: Killed)",
    re.MULTILINE,
)
"""What drivers of compilers say of a program they started. A source that makes a compiler say it is compiled three times, no more."""

T = TypeVar("T")


class KilledError(SandboxError):
    """A child died of SIGKILL, and nothing says that it brought it about."""


def until_believed(work: Callable[[bool], T]) -> T:
    """What `work` returns. It is called again, three times at most, where it raises SandboxError.

    Its argument says whether a SIGKILL is to be believed: if so, `work` must not raise KilledError.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return work(False)
        except SandboxError:
            continue
    return work(True)


def was_killed(returncode: int, log: str) -> bool:
    """Was a compiler that failed, or a program that it had started, killed?"""
    return returncode == -signal.SIGKILL or (returncode != 0 and COMPILER_WAS_KILLED.search(log) is not None)
