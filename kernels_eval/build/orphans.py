"""Ends compilers whose owner is gone: a compiler is a group of processes in a session of its own, and nothing else would end it.

Guarantees: when a process that calls `announce` in its compilers has died, of SIGKILL too, their groups are killed at once; a group that
was dismissed is never touched. One small process for each owner, started with its first compiler, which ends with it. Does not guarantee
anything where that small process is killed first: what is left then is swept by the next builder.

As a script (standard library alone): lines `+PGID` and `-PGID` come from standard input, and its end is the owner's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_lock = threading.Lock()
_pipe: tuple[int, int] | None = None
"""The process that it is of (after a fork, another one is needed) and the end that is written to."""


def watcher() -> int:
    """The descriptor that this process's watcher listens to. Starts it, once. Raises OSError where it cannot be started."""
    global _pipe
    with _lock:
        if _pipe is None or _pipe[0] != os.getpid():
            reading, writing = os.pipe2(os.O_CLOEXEC)
            try:
                # it leaves a session of its own behind and is no child of ours: Ray ends the children of a worker that exits
                subprocess.run([sys.executable, "-I", "-S", __file__], stdin=reading, stdout=subprocess.DEVNULL, check=True)
            except (OSError, subprocess.SubprocessError) as error:
                os.close(writing)
                raise OSError(f"no watcher of compilers can be started: {error}") from error
            finally:
                os.close(reading)
            _pipe = (os.getpid(), writing)
        return _pipe[1]


def announce(descriptor: int) -> None:
    """This process, which leads a group, is a compiler. Called between fork and exec, so that no moment is left unwatched."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # subprocess has made it deadly again by now
    with suppress(OSError):  # the watcher was killed: a build is not given up for that
        os.write(descriptor, b"+%d\n" % os.getpid())
    signal.signal(signal.SIGPIPE, before)


def dismiss(descriptor: int, group: int) -> None:
    """This group has ended, and its number may soon be another's."""
    with suppress(OSError):
        os.write(descriptor, b"-%d\n" % group)


def captured(command: Sequence[str], timeout_s: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of a compiler, with its output as text: its group is watched, and killed where the wait for it ends early.

    Raises subprocess.TimeoutExpired after `timeout_s` seconds.
    """
    descriptor = watcher()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
        preexec_fn=lambda: announce(descriptor), **options,
    )  # fmt: skip
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


def main() -> None:
    if os.fork():
        os._exit(0)
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when its owner does, and not before
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        change, group = line[:1], int(line[1:])
        groups.add(group) if change == b"+" else groups.discard(group)
    for group in groups:
        with suppress(OSError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
