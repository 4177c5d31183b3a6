"""The parent's side of isolation: a fork server, and one disposable child per candidate.

Guarantees: every wait has a deadline; a child that hangs, dies or exceeds its memory, its processes
or its scratch directory is killed with all of its descendants, and nothing of it is left when it is
closed; a dead child costs its own verdict only, and the death of a fork server costs none. Which
layers are in force is probed once and recorded. Does not guarantee anything about what native code
does to its own process: see docs.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kernels_eval.build.toolchain import default_cache, places_of
from kernels_eval.config import LimitsConfig
from kernels_eval.errors import KilledError, SandboxError
from kernels_eval.isolation import machine, process_tree
from kernels_eval.isolation.channel import Channel, ChannelClosed, ChannelTimeout
from kernels_eval.isolation.confinement import SCRATCH_FILES
from kernels_eval.isolation.layers import WITHOUT

POLL_S = 0.1
SCRATCH_POLL_S = 0.5
MEMORY_SHARE = 0.6
ANSWER_S = 30.0
"""How long the fork server may take for an answer."""
RESTARTED = "it is started again with the next candidate"
FOLDERS_GONE = "the fork server is gone, and its folders with it"


class ChildFailure(Exception):
    """A child did not answer. `reason` is a verdict reason; `detail` says what was seen."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class Child:
    """A forked process serving commands. Use as a context manager: leaving it kills it.

    `scratch` is where the parent puts files for the child to read. The child writes in
    `scratch/work`, its working directory and home, which with the layer `tmpfs_scratch` only it can
    see. `processes` lets it start other programs (Triton's compilers, torch.compile). A child that
    dies of SIGKILL is a KilledError, unless its role is in `blamed_roles`: then a ChildFailure as
    any other (kernels_eval.parent.kill_retry).
    """

    blamed_roles: frozenset[str] = frozenset()

    def __init__(
        self,
        server: ForkServer,
        role: str,
        limits: LimitsConfig,
        exchange_bytes: int = 0,
        *,
        processes: bool = False,
        exchange: int | None = None,
    ) -> None:
        """`exchange` is a descriptor of memory to return outputs through (it stays the caller's);
        without it a file of `exchange_bytes` in memory is made. Raises SandboxError where the fork
        server fails."""
        self._server, self._role, self._limits = server, role, limits
        self._memory_bytes = int(
            min(limits.memory_gb * (1 << 30), MEMORY_SHARE * machine.machine_memory_bytes())
        )
        self._scratch_checked = 0.0
        self.scratch = server.scratch_for(role)
        self._log = self.scratch / "log"
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self.pid: int | None = None
        self.dead: SandboxError | ChildFailure | None = None
        self.owed: str | None = None
        # In memory, and outside the child's scratch: the child gets the descriptor only.
        self.exchange_path = server.shared / f"{self.scratch.name}.bytes"
        self.exchange = self._opened(exchange_bytes, exchange)
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        request = {
            "spawn": role,
            "scratch": str(self.scratch),
            "limits": limits.model_dump(),
            "processes": processes,
        }
        try:
            self.pid = server.spawn(request, (theirs.fileno(), log, self.exchange))
        except SandboxError:
            self.close()  # a child that was forked all the same ends with its channel
            raise
        finally:
            theirs.close()
            os.close(log)

    def request(self, command: str, *, timeout: float, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its answer. Raises ChildFailure (timeout reasons are the
        caller's to rename), KilledError, and SandboxError where the fork server is gone, which
        takes its children along."""
        return self.resume({"command": command, **arguments}, timeout, command)

    def resume(
        self,
        message: dict[str, Any],
        timeout: float,
        command: str = "load",
        fds: tuple[int, ...] = (),
    ) -> dict[str, Any]:
        """Send any message (an answer the child waits for) and wait for what it says next. Raises
        as `request` does."""
        self.begin(message, fds)
        return self.finish(command, timeout)

    def begin(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Send a message, and leave waiting for the answer to `finish`. Raises as `request`
        does."""
        if self.dead:
            raise self.dead
        command = message.get("command", "load")
        if self.channel.pending():  # it would be taken for the answer to another question
            detail = f"the process answered before it was asked ({command!r})"
            raise self._fail("exited_early", detail)
        try:
            self.channel.send(message, fds)
        except ChannelClosed as error:
            raise self._post_mortem(str(error)) from None
        self.owed = command

    def finish(self, command: str, timeout: float) -> dict[str, Any]:
        """The answer to what was begun, within `timeout` seconds from now. Raises as `request`
        does."""
        if self.dead:
            raise self.dead
        try:
            answer = self._wait(timeout)
        except ChannelTimeout:
            raise self._fail("run", f"no answer to {command!r} within {timeout:g} s") from None
        except ChannelClosed as error:
            raise self._post_mortem(str(error)) from None
        self.owed = None
        if not isinstance(answer, dict):
            raise self._fail("exited_early", "the child answered with something else than a record")
        return answer

    def exchange_through(self, exchange_bytes: int, exchange: int | None, timeout: float) -> None:
        """Give a child that was started before its work was known what it returns outputs through
        (see the constructor). Raises as `request` does."""
        os.close(self.exchange)
        self.exchange_path.unlink(missing_ok=True)
        self.exchange = self._opened(exchange_bytes, exchange)
        self.resume({"command": "exchange"}, timeout, "exchange", (self.exchange,))

    def _opened(self, exchange_bytes: int, exchange: int | None) -> int:
        if exchange is not None:
            return os.dup(exchange)
        try:
            opened = os.open(self.exchange_path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError as error:  # closed meanwhile, by the thread of the warm pool
            raise SandboxError(FOLDERS_GONE, RESTARTED) from error
        os.ftruncate(opened, max(exchange_bytes, 1))
        return opened

    def write_file(self, name: str, text: str) -> Path:
        """Put a source file where the child can read it."""
        path = self.scratch / name
        path.write_text(text, encoding="utf-8", errors="replace")
        return path

    @property
    def gone(self) -> bool:
        """Whether it has died, as far as can be seen without asking it."""
        return self.dead is not None or self.pid is None or process_tree.has_ended(self.pid)

    def _wait(self, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        while True:
            try:
                return self.channel.receive(min(POLL_S, max(0.0, deadline - time.monotonic())))
            except ChannelTimeout:
                if time.monotonic() >= deadline:
                    raise
            self._watch()

    def _watch(self) -> None:
        """Kill the child where it exceeds a limit. Raises ChildFailure then; as `request` does
        where it has ended."""
        if self.pid is None:
            return
        if process_tree.has_ended(self.pid):  # its orphans can keep the channel open
            raise self._post_mortem("only descendants were left")
        limits, used, limit = self._limits, process_tree.usage(self.pid), self._memory_bytes
        # Resident memory counts what forked children share; reading the exact share is slow.
        if used.resident_bytes > limit and process_tree.proportional_memory(self.pid) > limit:
            detail = f"resident memory above the limit of {limit / (1 << 30):.3g} GB"
            raise self._fail("out_of_memory", detail)
        counts = (  # one process and one thread are the keeper's
            ("processes", used.processes - 1, limits.processes),
            ("threads", used.threads - 1, limits.threads),
        )
        for what, count, most in counts:
            if count > most:
                raise self._fail("crashed", f"killed: {count} {what}, the limit is {most}")
        now = time.monotonic()
        if (
            "scratch_watch" in self._server.isolation
            and now > self._scratch_checked + SCRATCH_POLL_S
        ):
            size, files = machine.disk_usage(self.scratch / "work", SCRATCH_FILES)
            self._scratch_checked = time.monotonic()
            if size > limits.scratch_mb << 20 or files > SCRATCH_FILES:
                used_mb = f"{files} files of {size >> 20} MB"
                raise self._fail(
                    "crashed", f"killed: {used_mb}, the limit is {limits.scratch_mb} MB"
                )

    def _fail(self, reason: str, detail: str) -> ChildFailure:
        self.dead = failure = ChildFailure(reason, detail)
        self.kill()
        return failure

    def _post_mortem(self, error: str) -> SandboxError | ChildFailure:
        """What the end of this child means."""
        code, cpu_s = self._server.reap(self.pid)
        self.pid = None
        limit_s = self._limits.cpu_s
        if code is None and not self._server.alive:
            lost = "the fork server was killed, and its children with it"
            self.dead = SandboxError(lost, RESTARTED)
        elif code is None:
            detail = f"the process gave up its channel and kept running ({error})"
            self.dead = ChildFailure("exited_early", detail)
        elif code in (-signal.SIGKILL, -signal.SIGXCPU) and cpu_s >= limit_s:
            detail = f"used {cpu_s:.0f} s of processor time, the limit is {limit_s} s"
            self.dead = ChildFailure("run", detail)
        elif code == -signal.SIGKILL and self._role not in self.blamed_roles:
            killed = f"the {self._role} process was killed by SIGKILL"
            self.dead = KilledError(killed, "see whether dmesg names the OOM killer", self._role)
        elif code < 0:
            name = signal.Signals(-code).name if -code in list(signal.Signals) else str(-code)
            self.dead = ChildFailure("crashed", f"the process was killed by {name}")
        else:
            detail = f"the process ended by itself with status {code} ({error})"
            self.dead = ChildFailure("exited_early", detail)
        return self.dead

    def cpu_clock(self, *, waiting: bool = False) -> Callable[[], int] | None:
        """A clock of the nanoseconds this child and its descendants have spent on a processor, as
        the kernel accounts them (schedstat); with `waiting`, also those in which they were ready to
        run and others had the processor.

        None where the kernel does not tell. Nothing inside the child can change what it reads.
        """
        columns = 2 if waiting else 1

        def read() -> int:
            total = 0
            for pid in (self.pid, *process_tree.descendants(self.pid)) if self.pid else ():
                for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                    with suppress(OSError):  # a thread that has just ended
                        total += sum(map(int, path.read_text().split()[:columns]))
            return total

        try:
            return read if read() > 0 else None
        except (ValueError, IndexError):
            return None

    def log_tail(self, count: int) -> str:
        try:
            with open(self._log, "rb") as handle:
                handle.seek(max(0, handle.seek(0, os.SEEK_END) - count))
                return handle.read().decode("utf-8", "replace")
        except OSError:
            return ""

    def kill(self) -> None:
        if self.pid is not None:
            self._server.kill(self.pid)
            self.pid = None

    def close(self) -> None:
        self.kill()
        self.channel.close()
        if self.exchange >= 0:
            os.close(self.exchange)
            self.exchange_path.unlink(missing_ok=True)
            self.exchange = -1
        shutil.rmtree(self.scratch, ignore_errors=True)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ForkServer:
    """A process that has imported torch and never touches a GPU; forks children in milliseconds.
    Raises SandboxError where it fails.

    `isolation` names the layers in force. `without` leaves some out (for tests;
    `$CONCUR_ISOLATION_WITHOUT` does the same). `readable` are directories whose files children may
    open by name but not list; by default the build cache, where their libraries are. `warm` names a
    role ("workload") whose first use of torch would take every child seconds: the server does it
    once.
    """

    def __init__(
        self,
        *,
        threads: int = 1,
        start_timeout_s: float = 180,
        without: Collection[str] | None = None,
        readable: Sequence[Path] | None = None,
        warm: str = "",
    ) -> None:
        machine.remove_abandoned()
        self.base = machine.new_folder()
        self.shared = machine.new_folder(machine.shared_memory())
        caches = readable if readable is not None else (default_cache(),)
        self._readable = [str(path) for cache in caches for path in places_of(cache)]
        without = os.environ.get(WITHOUT, "").split(",") if without is None else without
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self._asking = threading.RLock()  # the warm pool starts and ends children in a thread
        self._closed = False
        program = [sys.executable, "-m", "kernels_eval.isolation.forkserver"]
        with open(self.base / "forkserver.log", "wb") as log:
            self._process = subprocess.Popen(
                [*program, str(theirs.fileno()), warm, *without],
                pass_fds=(theirs.fileno(),),
                env=machine.child_environment(threads),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        theirs.close()
        try:
            self.isolation = tuple(map(str, self.channel.receive(start_timeout_s)["isolation"]))
        except (ChannelClosed, ChannelTimeout) as error:
            log_tail = (self.base / "forkserver.log").read_text(errors="replace")[-2000:]
            self.close()
            raise SandboxError(
                f"the fork server did not start: {error}. {log_tail}", "concur doctor"
            ) from error

    def scratch_for(self, role: str) -> Path:
        """A folder for one child. Raises SandboxError where this server is closed, and its folders
        are gone."""
        try:
            scratch = Path(tempfile.mkdtemp(prefix=f"{role}-", dir=self.base))
            (scratch / "work").mkdir(mode=0o700)
        except FileNotFoundError as error:
            raise SandboxError(FOLDERS_GONE, RESTARTED) from error
        return scratch

    def spawn(self, request: dict[str, Any], fds: tuple[int, ...]) -> int:
        """Fork a child. Returns its process id."""
        # A reference reads what candidates have returned.
        writable = [str(self.shared)] if request["spawn"] == "reference" else []
        try:
            answer = self._ask(request | {"readable": self._readable, "writable": writable}, fds)
            return int(answer["pid"])
        except (ChannelClosed, ChannelTimeout, KeyError) as error:
            # Whatever it still answers would be taken for the answer to another question.
            self.close()
            raise SandboxError(f"the fork server is gone: {error}", RESTARTED) from error

    def reap(self, pid: int | None) -> tuple[int | None, float]:
        """Exit status of a child that has ended (negative: signal), as subprocess gives it, and the
        seconds of processor time it used.

        None where it had to be killed, or the server is gone.
        """
        return self._ask_about("wait", pid)

    def kill(self, pid: int) -> None:
        """Kill a child with all of its descendants; they are gone when this returns."""
        if not self.alive:
            process_tree.kill_descendants(pid)
            return
        self._ask_about("kill", pid)

    def _ask_about(self, question: str, pid: int | None) -> tuple[int | None, float]:
        if pid is None:
            return None, 0.0
        try:
            answer = self._ask({question: pid})
            return answer.get("status"), float(answer.get("cpu_s", 0.0))
        except (ChannelClosed, ChannelTimeout):
            self.close()
            return None, 0.0

    def _ask(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> dict[str, Any]:
        with self._asking:
            self.channel.send(message, fds)
            answer: dict[str, Any] = self.channel.receive(ANSWER_S)
            return answer

    @property
    def alive(self) -> bool:
        return not self._closed and self._process.poll() is None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.channel.close()
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.base, ignore_errors=True)
        shutil.rmtree(self.shared, ignore_errors=True)
