"""How a run's process ends when it is told to stop, and how it survives the end of its worker.

SIGTERM (what a worker sends when a run is cancelled in the UI) and SIGINT (Ctrl-C) become an
exception in the main thread, and every stage cleans up behind itself. But a stage may wait for
something that takes minutes: a child's deadline, answers in flight. So a thread counts from the
signal.

A worker that dies takes along the other end of the pipe that the run prints to, and the next line
of the log would end the run: rich, through which Prefect prints, exits on a broken pipe.

Guarantees: `GRACE_S` after the first SIGTERM, no process below this one is left and this one ends,
also where the main thread hangs; the same after a SIGINT that the block has not ended by then;
finished work is on the disk, because snapshots survive SIGKILL at
any moment. Within milliseconds of the reader's death stdout and stderr go to the log of the stack's
worker, or nowhere where there is no stack. Does nothing outside of the main thread, where there are
no signals. Does not end processes of a Ray cluster that runs elsewhere, nor servers whose
supervisor is to stop them: those see that their owner is gone.
"""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kernels_eval.sandbox.process_tree import kill_descendants

if TYPE_CHECKING:
    from rich.console import Console

GRACE_S = 15.0
"""A worker of Prefect kills the run's process 30 s after SIGTERM, and leaves its children."""
SWEEP_S = 3.0
STOPS = (signal.SIGINT, signal.SIGTERM)
STACK_VARIABLE = "CONCUR_STACK_ROOT"
OUTPUTS = (1, 2)
_lock = threading.Lock()
_watched = False


# -- told to stop ----------------------------------------------------------------------------------


@contextmanager
def stops_soon(grace_s: float = GRACE_S) -> Iterator[None]:
    """End this process within `grace_s` seconds and a few of a SIGTERM that arrives inside the
    block; of a SIGINT, only where the block lasts that long: a caller may go on after it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    watch = _SignalWatch(reading, before, grace_s)
    watch.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        os.close(writing)
        watch.drained.wait()  # a signal of a moment ago may still be in the pipe
        if watch.told != signal.SIGTERM:
            watch.join()


class _SignalWatch(threading.Thread):
    """Reads the numbers of the signals that arrive, hands them on to who read them before, and
    counts from the first that tells this process to stop."""

    def __init__(self, reading: int, before: int, grace_s: float) -> None:
        super().__init__(name="stops soon", daemon=True)
        self.told, self.drained = 0, threading.Event()
        self._reading, self._before, self._grace_s = reading, before, grace_s

    def run(self) -> None:
        deadline = math.inf
        open_ = True
        while open_ or self.told == signal.SIGTERM:
            left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            ready = select.select([self._reading] if open_ else [], [], [], left)[0]
            if ready:
                numbers = os.read(self._reading, 64)
                open_ = bool(numbers)
                if self._before >= 0 and numbers:
                    with suppress(OSError):
                        os.write(self._before, numbers)
                asked = max((each for each in STOPS if each in numbers), default=0)
                if asked and not self.told:
                    deadline = time.monotonic() + self._grace_s
                    self._announce()
                self.told = max(self.told, asked)
                if not open_:
                    self.drained.set()
            elif time.monotonic() >= deadline:
                end_now(self.told)
        os.close(self._reading)

    def _announce(self) -> None:
        # How long the end took is what is asked first; the worker's log has the moment.
        now = f"{datetime.now().astimezone():%H:%M:%S%z}"
        with suppress(OSError, ValueError):
            os.write(2, f"{now} concur was told to stop: {self._grace_s:.0f} s at most\n".encode())


def end_now(number: int) -> None:
    """Kill every process below this one, then end this one as a signal of this number does. Does
    not return."""
    kill_descendants(os.getpid(), SWEEP_S)
    os._exit(128 + number)


# -- output that nobody reads ----------------------------------------------------------------------


def survive_closed_output() -> None:
    """From now on redirect stdout and stderr once their pipe has no reader; children that start
    afterwards write there as well.

    Calling it twice does nothing more. Not for commands of a terminal: `concur run | head` is meant
    to end.
    """
    global _watched
    pipes = [number for number in OUTPUTS if _is_pipe(number)]
    with _lock:
        if _watched or not pipes:
            return
        _watched = True
    threading.Thread(target=_watch, args=(pipes,), name="watches its output", daemon=True).start()
    for console in _consoles():
        vars(console)["on_broken_pipe"] = _redirect


def _is_pipe(number: int) -> bool:
    try:
        mode = os.fstat(number).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _watch(pipes: list[int]) -> None:
    poll = select.poll()
    for number in pipes:
        poll.register(number, 0)  # errors are always reported, and a pipe without a reader is one
    poll.poll()
    _redirect()


def _redirect() -> None:
    """Both outputs at once: one process reads them. Where the log cannot be opened, nothing is
    written any more."""
    root = os.environ.get(STACK_VARIABLE)
    log = Path(root, "stack", "logs", "worker.log") if root else Path(os.devnull)
    try:
        handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        handle = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    with _lock:
        for number in OUTPUTS:
            if _is_pipe(number):
                os.dup2(handle, number)
    os.close(handle)


def _consoles() -> Iterator[Console]:
    """Those of rich that log handlers of this process print through. That of Prefect is one."""
    if "rich.console" not in sys.modules:
        return
    from rich.console import Console

    for name in (None, *logging.root.manager.loggerDict):
        for handler in logging.getLogger(name).handlers:
            if isinstance(console := getattr(handler, "console", None), Console):
                yield console
