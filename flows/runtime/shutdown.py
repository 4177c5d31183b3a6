"""A run that is told to stop is gone soon, whatever its stages wait for.

SIGTERM (what a worker sends when a run is cancelled in the UI) becomes an exception in the main
thread, and every stage cleans up behind itself. But a stage may wait for something that takes
minutes: a child's deadline, answers in flight. So a thread counts from the signal.

Guarantees: `GRACE_S` after the first SIGTERM, no process below this one is left and this one ends,
also where the main thread hangs. What was finished before is on the disk: snapshots survive SIGKILL
at any moment. Does nothing outside of the main thread, where there are no signals. Does not end
processes of a Ray cluster that runs elsewhere, nor servers whose supervisor is to stop them: those
see that their owner is gone.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime

GRACE_S = 15.0
"""A worker of Prefect kills the run's process 30 s after SIGTERM, and nobody would look after its
children then."""
SWEEP_S = 3.0
TOLD_TO_STOP = 128 + signal.SIGTERM


@contextmanager
def stops_soon(grace_s: float = GRACE_S) -> Iterator[None]:
    """Inside the block, and until this process ends where the signal came inside: SIGTERM ends it
    within `grace_s` seconds and a few."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    watch = _Watch(reading, before, grace_s)
    watch.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        os.close(writing)
        watch.drained.wait()  # a signal of a moment ago may still be in the pipe
        if not watch.told.is_set():
            watch.join()


class _Watch(threading.Thread):
    """Reads the numbers of the signals that arrive, hands them on to who read them before, and
    counts from the first SIGTERM."""

    def __init__(self, reading: int, before: int, grace_s: float) -> None:
        super().__init__(name="stops soon", daemon=True)
        self.told, self.drained = threading.Event(), threading.Event()
        self._reading, self._before, self._grace_s = reading, before, grace_s

    def run(self) -> None:
        deadline: float | None = None
        open_ = True
        while open_ or deadline is not None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = select.select([self._reading] if open_ else [], [], [], left)[0]
            if ready:
                numbers = os.read(self._reading, 64)
                open_ = bool(numbers)
                if self._before >= 0 and numbers:
                    with suppress(OSError):
                        os.write(self._before, numbers)
                if signal.SIGTERM in numbers and deadline is None:
                    deadline = time.monotonic() + self._grace_s
                    self.told.set()
                    with suppress(
                        OSError, ValueError
                    ):  # the worker's log: how long the end took is the first thing that is asked
                        said = (
                            f"{datetime.now().astimezone():%H:%M:%S%z} concur was told to stop:"
                            f" {self._grace_s:.0f} s at most\n"
                        )
                        os.write(2, said.encode())
                if not open_:
                    self.drained.set()
            elif deadline is not None and time.monotonic() >= deadline:
                end_now()
        os.close(self._reading)


def end_now() -> None:
    """Kill every process below this one, then end this one. Does not return."""
    import psutil

    deadline = time.monotonic() + SWEEP_S
    while time.monotonic() < deadline:
        below = []
        with suppress(psutil.Error):
            below = [one for one in psutil.Process().children(recursive=True) if _runs(one)]
        if not below:
            break
        for one in below:
            with suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(below, timeout=0.5)
    os._exit(TOLD_TO_STOP)


def _runs(process: object) -> bool:
    import psutil

    with suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE  # type: ignore[attr-defined]
    return False
