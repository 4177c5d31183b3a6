"""Ends what outlives a process that was killed: its compilers, each a group in a session of its
own, and what is left of its own Ray.

Guarantees: when a process that calls `announce` in its compilers has died, of SIGKILL too, their
groups are killed at once; a group that was dismissed is never touched. When one that called
`ray_begins` has died, a process of the Ray that it started in itself has `LEAVES_S` seconds to go,
as most do at once, and is killed then: Ray's agents wait a minute for a control server that went
with their owner. A Ray that was started elsewhere, and is only joined, is never touched. One small
process for each owner, which ends with it. Does not guarantee anything where that small process is
killed first: compilers that are left then are swept by the next builder. Leaves Ray's folder of
logs where it is, as Ray itself does.

As a script (standard library alone): lines `+PGID`, `-PGID` and `ray NAME PID` come from standard
input, and its end is the owner's.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

LEAVES_S = 5.0
SWEEP_S = 15.0
"""After so long it gives up: a process that SIGKILL does not end waits for the kernel."""
LOOK_EVERY_S = 0.2

_lock = threading.Lock()
_pipe: tuple[int, int] | None = None
"""The process that it is of (after a fork, another one is needed) and the end that is written
to."""


def watcher() -> int:
    """The descriptor that this process's watcher listens to. Starts it, once. Raises OSError where
    it cannot be started."""
    global _pipe
    with _lock:
        if _pipe is None or _pipe[0] != os.getpid():
            reading, writing = os.pipe2(os.O_CLOEXEC)
            try:
                # it leaves a session of its own behind and is no child of ours: Ray ends the
                # children of a worker that exits
                subprocess.run(
                    [sys.executable, "-I", "-S", __file__],
                    stdin=reading,
                    stdout=subprocess.DEVNULL,
                    check=True,
                )
            except (OSError, subprocess.SubprocessError) as error:
                os.close(writing)
                raise OSError(
                    f"no watcher of what this process starts can be started: {error}"
                ) from error
            finally:
                os.close(reading)
            _pipe = (os.getpid(), writing)
        return _pipe[1]


def announce(descriptor: int) -> None:
    """This process, which leads a group, is a compiler. Called between fork and exec, so that no
    moment is left unwatched."""
    before = signal.signal(
        signal.SIGPIPE, signal.SIG_IGN
    )  # subprocess has made it deadly again by now
    with suppress(OSError):  # the watcher was killed: a build is not given up for that
        os.write(descriptor, b"+%d\n" % os.getpid())
    signal.signal(signal.SIGPIPE, before)


def dismiss(descriptor: int, group: int) -> None:
    """This group has ended, and its number may soon be another's."""
    with suppress(OSError):
        os.write(descriptor, b"-%d\n" % group)


def ray_begins() -> None:
    """A Ray that this process starts from now on, in itself, ends with it. Raises OSError where no
    watcher can be started.

    To be called before Ray starts, so that no moment is left unwatched. Ray names its session by
    the moment and by this process.
    """
    descriptor = watcher()
    with suppress(OSError):
        os.write(
            descriptor,
            f"ray session_{datetime.now():%Y-%m-%d_%H-%M-%S_%f} {os.getpid()}\n".encode(),
        )


def captured(
    command: Sequence[str], timeout_s: float, **options: Any
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of a compiler, with its output as text: its group is watched, and killed
    where the wait for it ends early.

    Raises subprocess.TimeoutExpired after `timeout_s` seconds.
    """
    descriptor = watcher()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=lambda: announce(descriptor),
        **options,
    )
    try:
        out, said = process.communicate(timeout=timeout_s)
    except BaseException:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    finally:
        dismiss(descriptor, process.pid)
    return subprocess.CompletedProcess(command, process.returncode, out, said)


def of_ray(since: str, owner: int) -> Iterator[int]:
    """Processes, but for `owner`, that write to the logs of a session of Ray that `owner` has
    started and whose name is not before `since`.

    By the files that they hold open for writing: Ray's processes overwrite their command lines and
    environments, and who only reads a log is somebody else. In this namespace alone: in another the
    owner's number is another process's.
    """
    logs = re.compile(rf"/(session_[\d_-]+_{owner})/logs/")
    here = os.stat("/proc/self/ns/pid").st_ino
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):  # it has ended, or is another user's
            if pid != owner and os.stat(f"/proc/{pid}/ns/pid").st_ino == here:
                for entry in os.scandir(f"/proc/{pid}/fd"):
                    written = entry.stat(follow_symlinks=False).st_mode & stat.S_IWUSR
                    if (
                        written
                        and (found := logs.search(os.readlink(entry.path)))
                        and found[1] >= since
                    ):
                        yield pid
                        break


def end_ray(since: str, owner: int) -> None:
    """Wait until no process of that Ray is left; kill those that do not leave."""
    began = time.monotonic()
    while (left := list(of_ray(since, owner))) and (waited := time.monotonic() - began) < SWEEP_S:
        for pid in left if waited > LEAVES_S else ():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_EVERY_S)


def main() -> None:
    if os.fork():
        os._exit(0)
    os.setsid()
    os.dup2(1, 2)  # /dev/null: where the owner is a worker of Ray's, its log
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when its owner does, and not before
    groups: set[int] = set()
    rays: list[tuple[str, int]] = []
    for line in sys.stdin.buffer:
        if line.startswith(b"ray "):
            _, since, owner = line.decode().split()
            rays.append((since, int(owner)))
            continue
        change, group = line[:1], int(line[1:])
        groups.add(group) if change == b"+" else groups.discard(group)
    for group in groups:
        with suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    if rays:
        end_ray(*rays[0])  # later ones of the same owner are among its


if __name__ == "__main__":
    main()
