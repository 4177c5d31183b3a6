"""Runs one server for an owner and lets nothing of it outlive that owner. A script of the standard
library alone, started by its path.

The owner writes one line of JSON to standard input (`command`, `log_dir`, `log_name`, `log_bytes`,
`lease_s`, `grace_s`), then `r` now and then to renew its lease, and `q` to have the server stopped,
or `k` where nobody takes answers any more. One JSON object a line comes back: `started` (pid, log),
then `exited` (status, `left`: processes that could not be killed), or `failed` where the command
cannot be run.

Guarantees: when the owner asks, is gone (its end of the pipe closes, whatever killed it) or has not
renewed its lease for `lease_s`, the server gets SIGTERM, `grace_s` later SIGKILL (`HURRY_S` later
at most, where nobody takes answers), and then every process that it has started, in whatever
session, is killed too; the same where the server ends by itself. Its output is in a file that, with
the one before it, stays below `log_bytes`. Where this process is killed itself, the kernel sends
the server SIGTERM; what the server started is then the server's to end.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SWEEP_S = 2.0
"""What the server started may end by itself for so long after it, before it is killed."""
HURRY_S = 5.0
"""Answers in flight that nobody waits for are no reason to wait: a run that is cancelled has 30 s
to be gone."""
GIVE_UP_S = 60.0
"""A process that a device driver holds cannot be killed."""
CHUNK_BYTES = 1 << 16
LOGS = 9
"""Log files of one name at most: two runs under one root write to one each."""
LIBC = ctypes.CDLL(None, use_errno=True)


class Log:
    """A file and the one before it (`.1`), together at most `limit_bytes`. Where the disk is full
    output is dropped."""

    def __init__(self, directory: str, name: str, limit_bytes: int) -> None:
        os.makedirs(directory, exist_ok=True)
        for number in range(1, LOGS + 1):
            stem = name if number == 1 else f"{name}-{number}"
            self._lock = os.open(
                os.path.join(directory, f".{stem}.lock"),
                os.O_RDWR | os.O_CREAT | os.O_CLOEXEC,
                0o600,
            )
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:  # another run's
                if number == LOGS:
                    raise
                os.close(self._lock)
            except OSError:  # a file system without locks
                break
        self.path, self._limit = os.path.join(directory, f"{stem}.log"), limit_bytes // 2
        self._open()

    def write(self, data: bytes) -> None:
        with suppress(OSError):
            for start in range(0, len(data), self._limit):
                piece = data[start : start + self._limit]
                if self._size + len(piece) > self._limit:
                    os.close(self._file)
                    os.replace(self.path, f"{self.path}.1")
                    self._open()
                self._size += os.write(self._file, piece)

    def _open(self) -> None:
        self._file = os.open(
            self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        self._size = os.fstat(self._file).st_size


class Supervisor:
    def __init__(self, spec: dict) -> None:
        self._spec, self._log = spec, Log(spec["log_dir"], spec["log_name"], spec["log_bytes"])
        self._wake, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)  # each wakes the loop through the pipe
        self._status: int | None = None

    def run(self) -> None:
        """One server, from its start until nothing of it is left."""
        parent = os.getpid()

        def tied() -> None:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

        self._log.write(
            f"--- {time.strftime('%Y-%m-%dT%H:%M:%S%z')} {json.dumps(self._spec['command'])}\n".encode()
        )
        try:
            self._server = subprocess.Popen(
                self._spec["command"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=tied,
            )
        except OSError as error:
            tell(event="failed", error=f"{self._spec['command'][0]}: {error.strerror}")
            return
        self._output = self._server.stdout.fileno()
        os.set_blocking(self._output, False)
        self._watched = {0, self._wake, self._output}
        tell(event="started", pid=self._server.pid, log=self._log.path)
        self._until_wanted_no_more()
        left = self._end()
        tell(event="exited", status=self._status, left=left)

    def _until_wanted_no_more(self) -> None:
        renewed = time.monotonic()
        while self._status is None:
            remaining = renewed + self._spec["lease_s"] - time.monotonic()
            if remaining <= 0:
                self._log.write(b"=== nobody has renewed the lease: stopping\n")
                return
            ready = self._wait(remaining)
            if 0 in ready:
                said = os.read(0, CHUNK_BYTES)
                if not said or b"q" in said or b"k" in said:
                    self._log.write(
                        b"=== stopping: " + (b"asked to\n" if said else b"the owner is gone\n")
                    )
                    if not said or b"k" in said:
                        self._spec["grace_s"] = min(self._spec["grace_s"], HURRY_S)
                    return
                renewed = time.monotonic()
            if self._wake in ready and set(os.read(self._wake, 512)) & {
                signal.SIGTERM,
                signal.SIGINT,
                signal.SIGHUP,
            }:
                return

    def _end(self) -> int:
        """Stop the server and whatever it started. Returns how many processes are left: 0, but for
        those that cannot be killed."""
        self._watched.discard(0)  # a closed pipe would be ready for ever
        self._signal(self._server.pid, signal.SIGTERM)
        deadline = time.monotonic() + self._spec["grace_s"]
        while self._status is None and time.monotonic() < deadline:
            self._drain(deadline - time.monotonic())
        if self._status is None:
            self._signal(self._server.pid, signal.SIGKILL)
        patience = time.monotonic() + min(SWEEP_S, self._spec["grace_s"])
        give_up = patience + GIVE_UP_S
        while (left := self._reap()) and time.monotonic() < give_up:
            if time.monotonic() > patience:
                for pid in descendants():
                    self._signal(pid, signal.SIGKILL)
            self._drain(0.05)
        self._drain(0)
        return len(descendants()) if left else 0

    def _drain(self, timeout_s: float) -> None:
        if self._wake in self._wait(timeout_s):
            with suppress(BlockingIOError):
                os.read(self._wake, 512)

    def _wait(self, timeout_s: float) -> set[int]:
        """Wait for something to happen; output goes to the log and the dead are reaped here,
        whatever else it was."""
        ready = set(select.select(list(self._watched), [], [], max(0.0, timeout_s))[0])
        if self._output in ready:
            try:
                data = os.read(self._output, CHUNK_BYTES)
            except BlockingIOError:
                data = b" "
            if not data:
                self._watched.discard(self._output)
            self._log.write(data)
        self._reap()
        return ready

    def _reap(self) -> bool:
        """Is a child left? As a subreaper this process inherits what the server leaves behind."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._server.pid:
                self._status = os.waitstatus_to_exitcode(status)

    def _signal(self, pid: int, number: int) -> None:
        """Only while it has not been reaped: its id is its own until then."""
        if pid != self._server.pid or self._status is None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def descendants() -> list[int]:
    """Ids of all processes below this one."""
    parents: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as handle:
            parents.setdefault(int(handle.read().rsplit(b")", 1)[1].split()[1]), []).append(
                int(name)
            )
    found, waiting = [], [os.getpid()]
    while waiting:
        below = parents.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def tell(**event: object) -> None:
    with suppress(OSError):  # the owner may be gone
        os.write(1, json.dumps(event).encode() + b"\n")


def main() -> None:
    spec = json.loads(sys.stdin.buffer.raw.readline())  # unbuffered: what follows belongs to select
    if os.fork():
        os._exit(
            0
            # no child of the owner any more: Ray kills the children of a worker that exits, and
            # with them this promise
        )
    os.setsid()
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        Supervisor(spec).run()
    except OSError as error:
        tell(
            event="failed", error=f"{error.filename or 'the supervisor'}: {error.strerror or error}"
        )


if __name__ == "__main__":
    main()
