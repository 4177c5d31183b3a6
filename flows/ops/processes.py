"""Processes by identity: a process is its id and the moment it started, so that an id that was
given again is never taken for the old one.

Guarantees: nothing is signalled that does not belong to the stack, whatever a file says about
process ids: not after a restart of the machine, not when ids are given again. What belongs to a
stack is what runs in the session of one of its parts, was started with its mark in the environment,
or is below such a process. Reads /proc, so Linux only.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kernels_eval.records import Record

MARK = "CONCUR_STACK_ROOT"
"""Variable that every process of a stack inherits; its value is the root."""


class Identity(Record):
    """One process, for ever: `started_ticks` after the start of the machine whose `boot` it is."""

    pid: int
    started_ticks: int
    boot: str


class Seen(NamedTuple):
    """A line of /proc/PID/stat."""

    pid: int
    parent: int
    session: int
    started_ticks: int
    zombie: bool


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def look(pid: int) -> Seen | None:
    """One process, or None where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return Seen(pid, int(fields[1]), int(fields[3]), int(fields[19]), fields[0] in (b"Z", b"X"))


def identify(pid: int) -> Identity | None:
    seen = look(pid)
    return Identity(pid=pid, started_ticks=seen.started_ticks, boot=boot_id()) if seen else None


def alive(identity: Identity | None) -> bool:
    """Does that very process run? One that has ended and was not yet collected by its parent does
    not."""
    if identity is None or identity.boot != boot_id():
        return False
    seen = look(identity.pid)
    return seen is not None and seen.started_ticks == identity.started_ticks and not seen.zombie


def everything() -> dict[int, Seen]:
    found = (look(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit())
    return {seen.pid: seen for seen in found if seen and not seen.zombie}


def members(mark: str | None, leaders: Iterable[Identity]) -> list[Identity]:
    """All live processes of a stack, or of its `leaders` alone where `mark` is None: never this
    process or one that it runs below."""
    boot, table = boot_id(), everything()
    sessions = {leader.pid: leader.started_ticks for leader in leaders if leader.boot == boot}
    found = {
        pid
        for pid, seen in table.items()
        if (
            seen.session in sessions
            and _same_session(table.get(seen.session), sessions[seen.session])
        )
        or (mark is not None and mark_of(pid) == mark)
    }
    below: dict[int, list[int]] = {}
    for seen in table.values():
        below.setdefault(seen.parent, []).append(seen.pid)
    waiting = list(found)
    while waiting:
        children = [pid for pid in below.get(waiting.pop(), []) if pid not in found]
        found.update(children)
        waiting += children
    found -= set(_lineage(os.getpid(), table))
    return [
        Identity(pid=pid, started_ticks=table[pid].started_ticks, boot=boot)
        for pid in sorted(found)
    ]


def _same_session(leader: Seen | None, started_ticks: int) -> bool:
    # while a session has members its id is not given again, so a leader that is gone cannot have
    # been replaced
    return leader is None or leader.started_ticks == started_ticks


def _lineage(pid: int, table: dict[int, Seen]) -> Iterable[int]:
    while pid in table:
        yield pid
        pid = table[pid].parent


def mark_of(pid: int) -> str | None:
    """The root that a process was started for; None where there is none or it may not be read."""
    return variable_of(pid, MARK)


def variable_of(pid: int, name: str) -> str | None:
    """A variable of the environment that a process was started with; None where it is not there or
    may not be read."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    start = f"{name}=".encode()
    return next(
        (
            entry[len(start) :].decode(errors="replace")
            for entry in environment.split(b"\0")
            if entry.startswith(start)
        ),
        None,
    )


def command_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    return " ".join(word.decode(errors="replace") for word in words)[:100]


def send(identity: Identity, number: int) -> bool:
    """Signal that very process. False where it is gone or is another user's."""
    try:
        handle = os.pidfd_open(identity.pid)
    except (ProcessLookupError, OSError):
        return False
    try:
        if not alive(
            identity
        ):  # after the handle was opened: it can no longer become another process
            return False
        signal.pidfd_send_signal(handle, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(handle)
    return True


def wait_gone(
    identities: Iterable[Identity], timeout_s: float, reap: Callable[[], None] = lambda: None
) -> list[Identity]:
    """Wait until they have ended. Returns those that have not within `timeout_s`; `reap` collects
    children of this process."""
    deadline = time.monotonic() + timeout_s
    left = [identity for identity in identities if alive(identity)]
    while left:
        poll, handles = select.poll(), []
        for identity in left[:256]:
            with suppress(OSError):
                handles.append(os.pidfd_open(identity.pid))
                poll.register(handles[-1], select.POLLIN)
        remaining = deadline - time.monotonic()
        if handles and remaining > 0:
            poll.poll(min(remaining, 1.0) * 1000)
        for handle in handles:
            os.close(handle)
        reap()
        left = [identity for identity in left if alive(identity)]
        if remaining <= 0:
            break
    return left
