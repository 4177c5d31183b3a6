"""Families of processes: who descends from whom, what they use together, and killing them until
none is left.

Guarantees: a descendant that made itself a session of its own is found as any other, as long as an
ancestor in between lives or is a subreaper (the keeper of every child is one). Numbers are a
moment's: processes come and go while they are read.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
KILL_S = 5.0
PAUSE_S = 0.002


@dataclass(frozen=True)
class Usage:
    processes: int
    threads: int
    resident_bytes: int


def descendants(root: int) -> list[int]:
    """Living descendants of a process, nearest first; zombies, which only wait to be reaped, are
    not counted."""
    table = None if _kernel_lists_children() else _children_by_parent()
    found: list[int] = []
    todo = [root]
    while todo:
        parent = todo.pop()
        below = table.get(parent, []) if table is not None else children(parent)
        todo += below
        found += [pid for pid in below if not has_ended(pid)]
    return found


def _kernel_lists_children() -> bool:
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def children(pid: int) -> list[int]:
    """Processes whose parent this is, zombies included, as the kernel lists them."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children") as handle:
                found += map(int, handle.read().split())
        except OSError:
            continue
    return found


def _children_by_parent() -> dict[int, list[int]]:
    """For kernels that do not list children, and for other systems."""
    found: dict[int, list[int]] = {}
    for process in psutil.process_iter(["ppid"]):
        found.setdefault(process.info["ppid"] or 0, []).append(process.pid)
    return found


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or waits to be reaped."""
    try:
        with open(f"/proc/{pid}/stat") as handle:
            return handle.read().rpartition(")")[2].split()[0] in "ZX"
    except (OSError, IndexError):
        return not psutil.pid_exists(pid)


def kill_descendants(root: int, timeout_s: float = KILL_S) -> bool:
    """Kill all descendants of a process, and those that they start meanwhile. True when none is
    left."""
    deadline = time.monotonic() + timeout_s
    while family := descendants(root):
        for pid in family:
            kill(pid)
        if time.monotonic() > deadline:
            return False
        time.sleep(
            PAUSE_S
        )  # between two looks at a condition: nobody tells when a stranger's process is gone
    return True


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def usage(root: int) -> Usage:
    """What a process and its descendants hold now. One that ends meanwhile counts as nothing; it
    does not hide the others."""
    if not os.path.isdir("/proc/self/task"):
        return _usage_by_psutil(root)
    processes = threads = resident = 0
    for pid in (root, *descendants(root)):
        try:
            with open(f"/proc/{pid}/statm") as handle:
                resident += int(handle.read().split()[1]) * PAGE_BYTES
            threads += len(os.listdir(f"/proc/{pid}/task"))
        except (OSError, IndexError):
            continue
        processes += 1
    return Usage(processes, threads, resident)


def _usage_by_psutil(root: int) -> Usage:
    processes = threads = resident = 0
    for pid in (root, *descendants(root)):
        try:
            process = psutil.Process(pid)
            resident, threads, processes = (
                resident + process.memory_info().rss,
                threads + process.num_threads(),
                processes + 1,
            )
        except psutil.Error:
            continue
    return Usage(processes, threads, resident)


def proportional_memory(root: int) -> int:
    """Bytes of a family with shared pages divided among those who share them (PSS): forked children
    share most of theirs."""
    total = 0
    for pid in (root, *descendants(root)):
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
        except OSError:
            continue
    return total


def disk_usage(directory: Path, most_files: int) -> tuple[int, int]:
    """Bytes and number of the files below a directory, as allocated; stops counting past
    `most_files`."""
    size = count = 0
    todo = [str(directory)]
    while todo and count <= most_files:
        try:
            with os.scandir(todo.pop()) as entries:
                for entry in entries:
                    count += 1
                    try:
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            todo.append(entry.path)
                    except OSError:
                        continue
                    if count > most_files:
                        break
        except OSError:
            continue
    return size, count
