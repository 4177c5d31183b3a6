"""The pool's workers as processes of this machine, without Ray.

Guarantees: one that dies is seen at once; all end with this process, however it ends. Has the
methods of `kernels_eval.pool.ray.Cluster`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from kernels_eval.sandbox import reaper

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
START = "import sys; sys.path[:] = {}; from kernels_eval.pool.local import serve; serve({})"
LOG_CHARS = 2000


class LostError(Exception):
    """The process of a worker has ended."""


class FailedError(Exception):
    """A worker's method raised `cause`."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(repr(cause))
        self.cause = cause


class Worker:
    """A process that makes one object, then calls its methods in turn."""

    def __init__(self, kind: type, given: Sequence[Any]) -> None:
        self.pipe, theirs = Pipe()
        self._log = tempfile.TemporaryFile()
        self._asked = 0
        self.answers: dict[int, tuple[bool, Any]] = {}
        self.process = subprocess.Popen(
            [sys.executable, "-c", START.format([*sys.path], theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C is for the pool
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
        theirs.close()
        reaper.watch(self.process.pid)
        with suppress(OSError):  # it has died, which the first answer says
            self.pipe.send((kind, tuple(given)))

    def call(self, method: str, *given: Any) -> Pending:
        """Call a method once those before it have ended; "" waits until the object is made."""
        self._asked += 1
        with suppress(OSError):
            self.pipe.send((method, given))
        return Pending(self, self._asked)

    def read(self) -> None:
        """Take the answers that are there. Raises LostError where the process has ended."""
        try:
            while self.pipe.poll():
                number, fine, answer = self.pipe.recv()
                self.answers = {number: (fine, answer)}  # earlier ones were given up
        except (EOFError, OSError) as error:
            raise LostError(self._last_words()) from error

    def _last_words(self) -> str:
        status = self.process.wait()
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - LOG_CHARS))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"its process ended with status {status}" + (f": {lines[-1]}" if lines else "")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()
        self._log.close()


@dataclass(frozen=True)
class Pending:
    """An answer that a worker owes."""

    worker: Worker
    number: int

    @property
    def done(self) -> bool:
        """Whether `Machine.get` returns or raises at once."""
        with suppress(LostError):
            self.worker.read()
            return self.number in self.worker.answers
        return True


class Machine:
    """The workers of this machine."""

    logs = "the message names its last line"

    def __init__(self, gpus: int) -> None:
        self.cpus, self.gpus = usable_cpus(), gpus

    def start(self, kind: type, given: Sequence[Any], **_: object) -> Worker:
        return Worker(kind, given)

    def started(self, worker: Worker) -> Pending:
        """Answers None, the place of all, once the worker's object is made."""
        return worker.call("")

    def call(self, worker: Worker, method: str, *given: Any) -> Pending:
        return worker.call(method, *given)

    def first_of(self, pending: Sequence[Pending], timeout_s: float) -> Pending | None:
        """One that is answered or lost, or None after `timeout_s` seconds."""
        for each in pending:
            if each.done:
                return each
        wait([each.worker.pipe for each in pending], timeout_s)
        return next((each for each in pending if each.done), None)

    def get(self, pending: Pending) -> Any:
        """The answer of one that is done. Raises LostError or FailedError."""
        if pending.number not in pending.worker.answers:
            pending.worker.read()
        fine, answer = pending.worker.answers.pop(pending.number)
        if not fine:
            raise FailedError(answer)
        return answer

    def kill(self, worker: Worker) -> None:
        worker.kill()

    def require_node(self) -> None:
        """This machine is there."""

    def is_full(self, kind: str, share: float) -> bool:
        """Nobody else's workers are placed here."""
        return False


def usable_cpus() -> int:
    """The cores that this process may use, by its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        quota, period = CPU_QUOTA.read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


# -- in the worker's process -----------------------------------------------------------------------


def serve(descriptor: int) -> None:
    pipe = Connection(descriptor)
    calls: SimpleQueue[Any] = SimpleQueue()

    def read() -> None:
        try:
            while True:
                calls.put(pipe.recv())
        except (EOFError, OSError):
            pass  # the pool has ended; compilers and sandboxes are the reaper's
        except BaseException:  # such as an import that fails: the pool repeats the last line
            traceback.print_exc()
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    kind, given = calls.get()
    made = kind(*given)
    number = 0
    while True:
        method, given = calls.get()
        number += 1
        try:
            answer = (True, getattr(made, method)(*given) if method else None)
        except Exception as error:
            answer = (False, _sendable(error))
        pipe.send((number, *answer))


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
