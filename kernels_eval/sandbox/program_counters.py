"""Where a stopped process was at work, read from outside: it has no say in that. See
proc_pid_syscall(5) and proc_pid_maps(5).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

RUNNING, IN_NO_CALL = "running", "-1"
STOPS_S = 1.0
"""Seconds that a thread has to take notice of a signal: it needs a processor for that."""


def program_counters(pid: int) -> list[int]:
    """Addresses of the instructions that its threads come to next, without those in system calls.
    Empty where the kernel does not tell.
    """
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/syscall"):
        with suppress(OSError, ValueError, IndexError):
            number, *_, address = _settled(path)
            if number == IN_NO_CALL:
                found.append(int(address, 16))
    return found


def files_at(pid: int, addresses: Iterable[int]) -> list[str]:
    """The file whose code is at each address, "" for none."""
    spans = []
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, *_, path = line.split(maxsplit=5) if line.count("/") else (*line.split(), "")
            low, high = (int(each, 16) for each in span.split("-"))
            spans.append((low, high, path))
    return [
        next((path for low, high, path in spans if low <= address < high), "")
        for address in addresses
    ]


def _settled(path: Path) -> list[str]:
    ends = time.monotonic() + STOPS_S
    while (words := path.read_text().split())[0] == RUNNING and time.monotonic() < ends:
        time.sleep(1e-4)
    return words
