"""Ends what a killed process leaves behind: its compilers, its servers and its own Ray (never one
it joined), the last after `LEAVES_S` seconds.

As a script (it imports nothing of this package) it reads lines `+PGID`, `+PGID NAME=VALUE`,
`-PGID`, `child PID` and `ray NAME PID` from standard input, whose end is the owner's.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from functools import partial

LEAVES_S = 5.0
GIVE_UP_S = 15.0
"""Seconds after SIGKILL; a process that lives on waits for the kernel."""
LOOK_EVERY_S = 0.2

_lock = threading.Lock()
_pipe: tuple[int, int] | None = None
"""The process it belongs to (a fork needs its own), and the writing end."""


def reaper() -> int:
    """This process's reaper's descriptor; starts it on the first call. Raises OSError."""
    global _pipe
    with _lock:
        if _pipe is None or _pipe[0] != os.getpid():
            reading, writing = os.pipe2(os.O_CLOEXEC)
            try:
                # It forks into a session of its own and is no child of this process: Ray ends the
                # children of a worker that exits.
                command = [sys.executable, "-I", __file__]
                subprocess.run(command, stdin=reading, stdout=subprocess.DEVNULL, check=True)
            except (OSError, subprocess.SubprocessError) as error:
                os.close(writing)
                raise OSError(f"the reaper of this process cannot be started: {error}") from error
            finally:
                os.close(reading)
            _pipe = (os.getpid(), writing)
        return _pipe[1]


def register(descriptor: int, mark: str = "") -> None:
    """Register the calling group leader; call between fork and exec, so no moment is unwatched.

    Its group is killed at once. With a variable `NAME=VALUE` of its environment it gets SIGTERM,
    and what is left of its session, or has that variable, SIGKILL `LEAVES_S` seconds later.
    """
    before = signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # subprocess has reset it to deadly
    with suppress(OSError):  # the reaper was killed: that must not fail a build
        os.write(descriptor, f"+{os.getpid()} {mark}\n".encode())
    signal.signal(signal.SIGPIPE, before)


def unregister(descriptor: int, group: int) -> None:
    """Forget a group that has ended: its number may be reused."""
    with suppress(OSError):
        os.write(descriptor, b"-%d\n" % group)


def watch(child: int) -> None:
    """End a child of this process together with it. Raises OSError where no reaper can be
    started.
    """
    descriptor = reaper()
    with suppress(OSError):
        os.write(descriptor, b"child %d\n" % child)


def watch_ray() -> None:
    """End with this process any Ray that it starts in itself from now on; call before. Raises
    OSError where no reaper can be started.
    """
    descriptor, now = reaper(), datetime.now()
    with suppress(OSError):
        line = f"ray session_{now:%Y-%m-%d_%H-%M-%S_%f} {os.getpid()}\n"
        os.write(descriptor, line.encode())


def ray_processes(since: str, owner: int) -> Iterator[int]:
    """Processes but `owner` that write logs of a Ray session it started, named `since` or later.

    Found by open files, as Ray overwrites command lines and environments. Only in this PID
    namespace.
    """
    import psutil

    logs = re.compile(rf"/(session_[\d_-]+_{owner})/logs/")
    here = os.stat("/proc/self/ns/pid").st_ino
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):  # it has ended, or is another user's
            if process.pid != owner and os.stat(f"/proc/{process.pid}/ns/pid").st_ino == here:
                opened = (
                    logs.search(file.path) for file in process.open_files() if file.mode != "r"
                )
                if any(found and found[1] >= since for found in opened):
                    yield process.pid


def server_processes(session: int, mark: str) -> Iterator[int]:
    """Processes of a session, and those with the variable `NAME=VALUE` in their environment."""
    import psutil

    name, _, value = mark.partition("=")
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):  # it has ended, or is another user's
            ours = os.getsid(process.pid) == session or process.environ().get(name) == value
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                yield process.pid


def end_all(looks: list[Callable[[], Iterator[int]]]) -> None:
    """Wait until no process is found any more; kill those that do not exit."""
    began = time.monotonic()
    while (left := [pid for look in looks for pid in look()]) and (
        waited := time.monotonic() - began
    ) < GIVE_UP_S:
        for pid in left if waited > LEAVES_S else ():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_EVERY_S)


def main() -> None:
    """Listen until the owner ends, then end what it has left."""
    if os.fork():
        os._exit(0)
    os.setsid()
    os.dup2(1, 2)  # /dev/null: where the owner is a worker of Ray's, stderr is its log
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when its owner does, and not before
    groups: dict[int, str] = {}
    looks: list[Callable[[], Iterator[int]]] = []
    children: list[int] = []
    for line in sys.stdin:
        if line.startswith("child "):
            with suppress(OSError):  # it has ended
                # a handle: when the owner ends, the number may be another process's
                children.append(os.pidfd_open(int(line[6:])))
        elif line.startswith("ray "):
            _, since, owner = line.split()
            # later ones of the same owner are covered by the first
            looks = looks or [partial(ray_processes, since, int(owner))]
        elif line.startswith("+"):
            group, _, mark = line[1:].strip().partition(" ")
            groups[int(group)] = mark
        else:
            groups.pop(-int(line), None)
    for group, mark in groups.items():
        with suppress(OSError):
            os.killpg(group, signal.SIGTERM if mark else signal.SIGKILL)
        if mark:
            looks.append(partial(server_processes, group, mark))
    for child in children:
        with suppress(OSError):
            signal.pidfd_send_signal(child, signal.SIGTERM)
    end_all(looks)


if __name__ == "__main__":
    main()
