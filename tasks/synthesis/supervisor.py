"""One server process with everything below it, and the process that lets nothing of it outlive its
owner: `Supervised` is the owner's end of the pipe, `Supervisor` the other one.

The owner writes one line of JSON to standard input (`Command`), then `r` now and then to renew its
lease, and `q` to have the server stopped, or `k` where answers are no longer wanted. Lines of JSON
come back: attributes of `Supervised` with their values.

Guarantees: when the owner asks, is gone (its end of the pipe closes, whatever killed it) or has not
renewed its lease for `lease_s`, the server gets SIGTERM, `grace_s` later SIGKILL (`HURRY_S` later
at most, where answers are no longer wanted), and then every process that it has started, in
whatever session, is killed too; the same where the server ends by itself. Its output is in a file
that, with the one before it (`.1`), stays below `log_bytes`; where the disk is full output is
dropped. Where the supervisor is killed itself, the kernel sends the server SIGTERM, and the owner
kills its group.
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from kernels_eval.sandbox.process_tree import descendants, identify, kill_descendants, send
from kernels_eval.sandbox.syscalls import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl

SWEEP_S = 2.0
"""What the server started may end by itself for so long after it, before it is killed."""
HURRY_S = 5.0
"""Answers in flight that are no longer wanted are no reason to wait: a run that is cancelled has 30
s to be gone."""
GIVE_UP_S = 60.0
"""A process that a device driver holds cannot be killed."""
ORPHAN_S = 5.0
"""A server whose supervisor was killed has its SIGTERM from the kernel; so long after it, its group
is killed."""
CHUNK_BYTES = 1 << 16
LOGS = 9
"""Log files of one name at most: two runs under one root write to one each."""
RENEW, STOP, HURRY, OWNER_GONE, ENDED = b"r", b"q", b"k", b"", b"ended"
START = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r});"
    " from tasks.synthesis.supervisor import main; main()"
)
START_LINE = re.compile(r"^--- \d{4}-.*\n", re.MULTILINE)
TAIL_BYTES, TAIL_LINES = 1 << 17, 30
ENGINE_FAULT = re.compile(
    r"^\((?!APIServer)\w+[^)\n]*\) ERROR [^\]\n]*\] (?:\w+\.)*\w*(?:Error|Exception)\b.*",
    re.MULTILINE,
)
"""An exception of one of vLLM's other processes. Its server, which ends later, names no cause."""


@dataclass(frozen=True)
class Command:
    """What to run, and how long it may live. All times are in seconds, sizes in bytes."""

    command: list[str]
    log_dir: str
    log_name: str
    log_bytes: int
    lease_s: float
    grace_s: float


class Supervised:
    """A server that was started; `ended` is set when nothing of it is left."""

    pid: int | None = None
    log: str | None = None
    status: int | None = None
    fault: str | None = None
    """Why there was no server at all: the command cannot be run, say."""

    def __init__(self, command: Command, env: Mapping[str, str]) -> None:
        self.ended = threading.Event()
        self._lock = threading.Lock()
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(env),
            bufsize=0,
        )
        assert process.stdin and process.stdout
        self._stdin, self._stdout = process.stdin, process.stdout
        self._say(json.dumps(asdict(command)).encode() + b"\n")
        process.wait()  # what was started forks the supervisor and ends
        _thread(self._listen)

    def renew(self) -> None:
        """The owner, or who it works for, is alive."""
        self._say(RENEW)

    def stop(self, at_once: bool = False) -> None:
        """Ask for the end; `ended` says when it has come. `at_once`: do not wait for the answers
        in flight."""
        self._say(HURRY if at_once else STOP)

    def tail(self) -> str:
        """The last lines of what this server has written, and before them what its engine died of;
        empty where it has written nothing."""
        with suppress(OSError):
            if self.log:
                text = Path(self.log).read_bytes()[-TAIL_BYTES:].decode("utf-8", "replace")
                text = START_LINE.split(text)[-1]
                lines, faults = text.splitlines()[-TAIL_LINES:], ENGINE_FAULT.findall(text)
                earlier = [fault for fault in faults[-1:] if fault not in lines]
                return "\n".join(earlier + lines)
        return ""

    def _say(self, words: bytes) -> None:
        with self._lock, suppress(OSError, ValueError):  # it has ended, and its pipe may be closed
            self._stdin.write(words)

    def _listen(self) -> None:
        for line in self._stdout:  # to its end: the supervisor itself is gone then, too
            vars(self).update(json.loads(line))
        if self.status is None and self.fault is None and self.pid is not None:
            self._end_group(self.pid)  # the supervisor was killed
        for pipe in (self._stdin, self._stdout):
            pipe.close()
        self.ended.set()

    def _end_group(self, group: int) -> None:
        deadline = time.monotonic() + ORPHAN_S
        with suppress(ProcessLookupError, PermissionError):
            while time.monotonic() < deadline:
                os.killpg(group, 0)  # raises once the group is empty
                time.sleep(0.05)
            os.killpg(group, signal.SIGKILL)


class Log:
    """A file and the one before it, together at most `limit_bytes`. Safe for several threads."""

    def __init__(self, directory: Path, name: str, limit_bytes: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"{_lock_name(directory, name)}.log"
        self._limit, self._lock = limit_bytes // 2, threading.Lock()
        self._file = self._open()

    def write(self, data: bytes) -> None:
        with self._lock, suppress(OSError):
            if self._file.tell() + len(data) > self._limit:
                self._file.close()
                self.path.replace(f"{self.path}.1")
                self._file = self._open()
            self._file.write(data)

    def _open(self) -> IO[bytes]:
        handle = self.path.open("ab", buffering=0)
        os.fchmod(handle.fileno(), 0o600)
        return handle


def _lock_name(directory: Path, name: str) -> str:
    """The first of `name`, `name-2`, ... that no other run has. Held until this process ends."""
    for number in range(1, LOGS + 1):
        stem = name if number == 1 else f"{name}-{number}"
        lock = os.open(directory / f".{stem}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return stem
        except BlockingIOError:
            os.close(lock)
        except OSError:  # a file system without locks
            return stem
    raise BlockingIOError(None, "too many runs write logs there", f"{directory}/{name}.log")


class Supervisor:
    """One server, from its start until nothing of it is left. Raises OSError."""

    def __init__(self, spec: Command) -> None:
        self._spec = spec
        self._log = Log(Path(spec.log_dir), spec.log_name, spec.log_bytes)
        self._heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def run(self) -> None:
        parent, command = os.getpid(), self._spec.command

        def end_with_supervisor() -> None:
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self._heard.put(STOP))
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        self._log.write(f"--- {started} {json.dumps(command)}\n".encode())
        try:
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_supervisor,
            )
        except OSError as error:
            tell(fault=f"{command[0]}: {error.strerror}")
            return
        tell(pid=server.pid, log=str(self._log.path))
        copying = _thread(lambda: self._copy(server))
        _thread(lambda: self._wait(server))
        _thread(self._listen)
        self._end(server, self._until_unwanted())
        copying.join(timeout=SWEEP_S)
        tell(status=server.returncode)

    def _copy(self, server: subprocess.Popen[bytes]) -> None:
        assert server.stdout is not None
        while data := os.read(server.stdout.fileno(), CHUNK_BYTES):
            self._log.write(data)

    def _wait(self, server: subprocess.Popen[bytes]) -> None:
        server.wait()
        self._heard.put(ENDED)

    def _listen(self) -> None:
        while said := os.read(0, CHUNK_BYTES):
            self._heard.put(next(word for word in (HURRY, STOP, RENEW) if word in said))
        self._heard.put(OWNER_GONE)

    def _until_unwanted(self) -> float:
        """Returns how many seconds the server has to end by itself."""
        grace_s = self._spec.grace_s
        while True:
            try:
                heard = self._heard.get(timeout=self._spec.lease_s)
            except queue.Empty:
                self._log.write(b"=== nobody has renewed the lease: stopping\n")
                return grace_s
            if heard == RENEW:
                continue
            if heard != ENDED:
                why = b"the owner is gone" if heard == OWNER_GONE else b"asked to"
                self._log.write(b"=== stopping: " + why + b"\n")
            return min(grace_s, HURRY_S) if heard in (HURRY, OWNER_GONE) else grace_s

    def _end(self, server: subprocess.Popen[bytes], grace_s: float) -> None:
        """Stop the server and whatever it started."""
        process = identify(server.pid)
        for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, GIVE_UP_S)):
            if process and server.poll() is None:
                send(process, number)
                with suppress(subprocess.TimeoutExpired):
                    server.wait(timeout=patience_s)
        # as a subreaper this process inherits what the server leaves behind
        patience = time.monotonic() + min(SWEEP_S, grace_s)
        while descendants(os.getpid()) and time.monotonic() < patience:
            time.sleep(0.05)
        kill_descendants(os.getpid(), GIVE_UP_S)


def _thread(target: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def tell(**news: object) -> None:
    """Send attributes to the owner, who may be gone."""
    with suppress(OSError):
        os.write(1, json.dumps(news).encode() + b"\n")


def main() -> None:
    """Read what to run from standard input, and run it in a process of its own."""
    # read byte by byte: what follows the line belongs to `_listen`
    line = b"".join(iter(lambda: os.read(0, 1).replace(b"\n", b""), b""))
    if os.fork():
        # The supervisor is no child of the owner: Ray kills the children of a worker that exits.
        os._exit(0)
    os.setsid()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        Supervisor(Command(**json.loads(line))).run()
    except OSError as error:
        tell(fault=f"{error.filename or 'the supervisor'}: {error.strerror or error}")
    os._exit(0)
