"""How a run's process ends, and continues when its worker dies.

SIGTERM (a worker cancels) and SIGINT become exceptions in the main thread. Guarantees: `GRACE_S`
later, where the block has not ended, this process and all below are gone. Main thread only.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flows.stack.layout import ROOT_VARIABLE
from kernels_eval.sandbox.process_tree import kill_descendants

GRACE_S = 15.0
"""Shorter than the 30 s after which Prefect's worker kills the process but leaves its children."""
KILL_S = 3.0
STOPS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stops_soon(grace_s: float = GRACE_S) -> Iterator[None]:
    """End this process within about `grace_s` seconds of a SIGTERM inside the block; of a SIGINT
    only while the block lasts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    watch = SignalWatch(reading, before, grace_s)
    watch.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        os.close(writing)
        watch.drained.wait()  # a signal of a moment ago may still be in the pipe
        if watch.told != signal.SIGTERM:
            watch.join()


class SignalWatch(threading.Thread):
    """Reads numbers of arriving signals, passes them to the earlier reader, and counts from the
    first that means stop."""

    def __init__(self, reading: int, before: int, grace_s: float) -> None:
        super().__init__(daemon=True)
        self.told, self.drained = 0, threading.Event()
        self._reading, self._before, self._grace_s = reading, before, grace_s

    def run(self) -> None:
        while not self.drained.is_set():
            self._wait([self._reading])
            numbers = os.read(self._reading, 64)
            if self._before >= 0 and numbers:
                with suppress(OSError):
                    os.write(self._before, numbers)
            self.told = max(self.told, *(each for each in STOPS if each in numbers), 0)
            if not numbers:
                self.drained.set()
        os.close(self._reading)
        if self.told == signal.SIGTERM:
            self._wait([])

    def _wait(self, handles: list[int]) -> None:
        """Wait for one of these; too long after a signal, end this process and all below it."""
        ready, _, _ = select.select(handles, [], [], self._grace_s if self.told else None)
        if not ready:
            kill_descendants(os.getpid(), KILL_S)
            os._exit(128 + self.told)


def write_to_log() -> None:
    """Let a process of the stack's worker write to the worker's log itself: a killed worker closes
    its pipe, and the next line would end the run."""
    root = os.environ.get(ROOT_VARIABLE)
    if not root:
        return
    with suppress(OSError):
        log = Path(root, "stack", "logs", "worker.log")
        handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        for number in (1, 2):
            os.dup2(handle, number)
        os.close(handle)
