"""Turns of lanes on one device: several compare at once, one times alone.

Guarantees, between processes that name one file (`flock`):
- who is alone excludes everybody else, who is `aside` meanwhile;
- who waits to be alone goes before who asks again to share, the others before the next to be alone:
  nobody starves where every turn ends;
- the turn of a process that ends, however it ends, is free.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN, flock
from functools import cached_property
from pathlib import Path


def turns_file(device: str) -> Path:
    """The file of a device of this machine; `device` is unique on it, such as a GPU's UUID."""
    return Path(tempfile.gettempdir()) / f"concur_turns-{os.getuid()}-{device}"


LINGER_S = 0.1
"""Seconds that a shared turn outlives its work: to go aside waits for what starts and ends."""


class Turns:
    """One lane's turns. Without a file nobody else is on the device, and every turn is free."""

    def __init__(
        self,
        file: Path | None = None,
        aside: Callable[[], AbstractContextManager[object]] = nullcontext,
        settle: Callable[[], object] = bool,
    ) -> None:
        """`aside`: a context in which nothing of this lane touches the device; `settle()` waits for
        what a lane without work still does there.
        """
        self.file, self._aside, self._settle = file, aside, settle
        self._held: int | None = None
        self._waited_s = 0.0
        self._ending: threading.Timer | None = None
        self._lock = threading.Lock()

    @cached_property
    def _turn(self) -> int:
        return self._open("turn")

    @cached_property
    def _next(self) -> int:
        """Held while one waits for a turn: first come, first served."""
        return self._open("next")

    def _open(self, name: str) -> int:
        return os.open(f"{self.file}.{name}", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)

    def clock(self) -> float:
        """Seconds (`time.monotonic`) without those waited for a turn."""
        return time.monotonic() - self._waited_s

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Others may share the device. It ends `LINGER_S` later, unless the next one begins."""
        if self.file is None:
            yield
            return
        with self._lock:
            self._stay()
            if self._held is None:
                self._take(LOCK_SH)
        try:
            yield
        finally:
            self._ending = threading.Timer(LINGER_S, self._end)
            self._ending.daemon = True
            self._ending.start()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else is on the device, within a shared turn, which goes on afterwards."""
        if self._held != LOCK_SH:
            yield
            return
        self._change(LOCK_EX)
        try:
            yield
        finally:
            self._change(LOCK_SH)

    def end(self) -> None:
        with self._lock:
            self._stay()
            self._leave_aside()

    def _end(self) -> None:
        with self._lock:
            if self._ending is threading.current_thread():
                self._leave_aside()

    def _stay(self) -> None:
        if self._ending:
            self._ending.cancel()
            self._ending = None

    def _leave_aside(self) -> None:
        if self._held is None:
            return
        try:
            self._settle()
        finally:
            self._leave()

    def give_way(self) -> None:
        if self._held != LOCK_SH:
            return
        try:
            flock(self._next, LOCK_SH | LOCK_NB)
        except BlockingIOError:
            self._change(LOCK_SH)
        else:
            flock(self._next, LOCK_UN)

    def _change(self, kind: int) -> None:
        with self._aside():
            self._leave()
            self._take(kind)

    def _take(self, kind: int) -> None:
        began = time.monotonic()
        flock(self._next, kind)
        try:
            flock(self._turn, kind)
        finally:
            flock(self._next, LOCK_UN)
        self._held = kind
        self._waited_s += time.monotonic() - began

    def _leave(self) -> None:
        flock(self._turn, LOCK_UN)
        self._held = None
