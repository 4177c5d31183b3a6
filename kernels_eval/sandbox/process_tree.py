"""Process trees: members, descendants, memory, and ending all of a tree.

    server = identify(popen.pid)             # psutil's: no other process of the same id
    if server and alive(server):             # False also where it is a zombie
        send(server, signal.SIGTERM)
    left = wait_gone([server], timeout_s=8)  # those that still run
    kill_descendants(os.getpid())            # everything below this process, in any session
    usage(popen.pid).resident_bytes          # of a process and all of its descendants
    Deadline(120).passed(popen.pid)          # their processor time, and sleep of all
    members([server], {"CONCUR_ROOT": "/x"}) # its session, what has this variable, and all below

Guarantees: a descendant in its own session is found while an ancestor in between lives or is a
subreaper. Numbers are of one moment. Another user's process cannot be signalled and shows no
environment.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil

from kernels_eval.config import WALL_SHARE

KILL_S = 5.0
PAUSE_S = 0.002
LOOK_S = 0.5
READ_BYTES = 1 << 16
ENDED = ("Z", "X")
ASLEEP = ("S", *ENDED)
"""States of a thread (proc(5)) in which it asks for nothing."""
FLAGS, EXITING = 6, 0x4
"""Index of a stat file's flags after the name, and PF_EXITING (Linux's include/linux/sched.h)."""
NO_MARKS: Mapping[str, str] = {}


@dataclass(frozen=True)
class Usage:
    """What a process and its descendants hold."""

    processes: int
    threads: int
    resident_bytes: int


class LookingClock:
    """Seconds (`time.monotonic`) for who looks again within `LOOK_S`: what is longer was no time of
    this process, as where the machine is suspended.
    """

    def __init__(self) -> None:
        self._looked, self._lost_s = time.monotonic(), 0.0

    def __call__(self) -> float:
        now = time.monotonic()
        self._lost_s += max(0.0, now - self._looked - LOOK_S)
        self._looked = now
        return now - self._lost_s


@dataclass
class Deadline:
    """A limit of `limit_s` seconds of processor time or sleep. Waiting for a processor or a disk
    counts only from `WALL_SHARE` times as much wall time on.
    """

    limit_s: float
    spent_s: float = 0.0
    """processor time of what has ended, and time in which nothing of a tree was awake"""
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.clock = LookingClock()
        self.looked = self.clock()

    def passed(self, root: int | None = None) -> bool:
        """Whether it has passed, given what the running process's tree has used so far."""
        now, before = self.clock(), self.looked
        self.looked = now
        if root and not is_awake(root):
            self.spent_s += now - before
        used_s = self.spent_s + (processor_s(root) if root else 0.0)
        return used_s >= self.limit_s or now >= self.began + WALL_SHARE * self.limit_s


def identify(pid: int) -> psutil.Process | None:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid)
    return None


def alive(process: psutil.Process) -> bool:
    """Whether this very process runs. A zombie does not."""
    return process.is_running() and not has_ended(process.pid)


def has_ended(pid: int) -> bool:
    """Whether a process is gone or a zombie. A `headless` one is neither."""
    stat = _stat(f"/proc/{pid}/stat")
    return (not stat or stat[0] in ENDED) and not headless(pid)


def headless(pid: int) -> bool:
    """Whether only a process's first thread has ended: it looks like a zombie, with hidden memory.
    False where the others end too.
    """
    threads = f"/proc/{pid}/task"
    return _has_state(f"{threads}/{pid}/stat", ENDED) and not _all_have(threads, ENDED)


def _all_have(threads: str, states: tuple[str, ...]) -> bool:
    try:
        return all(_has_state(f"{threads}/{each}/stat", states) for each in os.listdir(threads))
    except OSError:
        return True


def _has_state(stat: str, states: tuple[str, ...]) -> bool:
    said = _stat(stat)
    return not said or said[0] in states or bool(int(said[FLAGS]) & EXITING)


def _stat(path: str) -> list[str]:
    """Fields of a stat file after the name; none where the process is gone."""
    with suppress(OSError):
        return _read(path).rpartition(b")")[2].decode().split()
    return []


def _read(path: str) -> bytes:
    """A file of /proc. A verdict reads hundreds: pathlib and psutil take three times as long."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(descriptor, READ_BYTES):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def environment_variable(pid: int, name: str) -> str | None:
    """A variable that a process was started with; None where unset or unreadable."""
    with suppress(psutil.Error, OSError):
        return psutil.Process(pid).environ().get(name)
    return None


def command_line(pid: int) -> str:
    """The command of a process, empty where it is gone or may not be read."""
    with suppress(psutil.Error, OSError):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


# -- families ------------------------------------------------------------------------------------


def descendants(root: int) -> list[int]:
    """Living descendants of a process, nearest first, without zombies."""
    return [pid for pid in _family(root)[1:] if not has_ended(pid)]


@cache
def _has_lists() -> bool:
    """Whether the kernel lists a process's children (CONFIG_PROC_CHILDREN)."""
    return os.path.exists("/proc/thread-self/children")


def _family(root: int) -> list[int]:
    if not _has_lists():
        process = identify(root)
        below = process.children(recursive=True) if process else []
        return [root, *(each.pid for each in below)]
    found: list[int] = []
    todo = [root]
    while todo:
        parent = todo.pop()
        found.append(parent)
        todo += children(parent)
    return found


def children(pid: int) -> list[int]:
    """Child processes and zombies, from the kernel's list where there is one: psutil reads every
    process.
    """
    found: list[int] = []
    threads = f"/proc/{pid}/task"
    with suppress(OSError):
        for thread in os.listdir(threads):
            with suppress(OSError):
                found += map(int, _read(f"{threads}/{thread}/children").split())
    return found


def members(
    leaders: Iterable[psutil.Process], marks: Mapping[str, str] = NO_MARKS
) -> list[psutil.Process]:
    """Live processes in sessions of `leaders` or with a variable of `marks`, and all below; never
    this one or its ancestors.
    """
    # A session's id is not given again while it has members, so a leader that is gone was not
    # replaced by another process.
    sessions = {
        leader.pid for leader in leaders if leader.is_running() or not psutil.pid_exists(leader.pid)
    }
    found: set[int] = set()
    for pid in psutil.pids():
        with suppress(ProcessLookupError, PermissionError):
            marked = any(environment_variable(pid, name) == value for name, value in marks.items())
            if marked or os.getsid(pid) in sessions:
                found.update(_family(pid))
    found -= {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    processes = filter(None, map(identify, sorted(found)))
    return [process for process in processes if alive(process)]


def usage(root: int) -> Usage:
    """What a process and its descendants hold now; one that ends meanwhile counts as nothing."""
    found = []
    for pid in (root, *descendants(root)):
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            with process.oneshot():
                held = process.memory_info().rss + page_tables_bytes(pid)
                found.append((1, process.num_threads(), held))
    return Usage(*map(sum, zip(*found, strict=True))) if found else Usage(0, 0, 0)


def processor_s(root: int) -> float:
    """Processor seconds of a tree, reaped processes included. Parents are read first: none counts
    twice.
    """
    total = 0.0
    for pid in _family(root):
        with suppress(psutil.Error):
            total += sum(psutil.Process(pid).cpu_times()[:4])
    return total


def is_awake(root: int) -> bool:
    """Whether a thread of the tree runs, waits for a processor or a disk, or is stopped."""
    return any(not _all_have(f"/proc/{pid}/task", ASLEEP) for pid in _family(root))


def page_tables_bytes(pid: int) -> int:
    """Bytes of a process's page tables, which no resident set counts. 0 where unknown."""
    with suppress(OSError):
        tables = Path(f"/proc/{pid}/status").read_text().partition("VmPTE:")[2].split()
        return int(tables[0]) << 10 if tables else 0
    return 0


def proportional_memory(root: int) -> int:
    """Bytes of a tree with shared pages divided (PSS): forked children share most. Linux only: 0
    elsewhere.
    """
    total = 0
    for pid in (root, *descendants(root)):
        with suppress(psutil.Error):
            total += getattr(psutil.Process(pid).memory_full_info(), "pss", 0)
            total += page_tables_bytes(pid)
    return total


# -- ending --------------------------------------------------------------------------------------


def kill(pid: int) -> None:
    """Send SIGKILL to a process that may be gone; only to children and below, whose ids are not
    reused.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_descendants(root: int, timeout_s: float = KILL_S) -> bool:
    """Kill all descendants of a process, also new ones. True when none is left."""
    deadline = time.monotonic() + timeout_s
    while family := descendants(root):
        for pid in family:
            kill(pid)
        if time.monotonic() > deadline:
            return False
        time.sleep(PAUSE_S)  # the end of a process that is not a child cannot be waited for
    return True


def send(process: psutil.Process, number: int) -> None:
    """Send a signal to this very process, unless it is gone or another user's."""
    with suppress(psutil.Error):
        process.send_signal(number)


def wait_gone(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until all have ended, and reap this process's children. Returns those that still run
    after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    for process in processes:
        with suppress(ProcessLookupError):
            if alive(process):
                ends_within(process.pid, max(0.0, deadline - time.monotonic()))
        with suppress(psutil.TimeoutExpired):
            process.wait(0)
    return [process for process in processes if alive(process)]


def ends_within(pid: int, timeout_s: float) -> bool:
    """Whether a process ends by then; a child of this one stays a zombie, whose times can be read.
    Raises ProcessLookupError where there is none.
    """
    handle = os.pidfd_open(pid)
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)
