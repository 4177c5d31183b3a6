"""The parent's handle on a child: one disposable, confined process per candidate.

Guarantees: every wait has a deadline; a child that hangs, dies or exceeds a limit is killed with
all descendants; a dead child costs its own verdict only.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kernels_eval.config import (
    HEADLESS_S,
    LOG_BYTES,
    MEMORY_SHARE,
    SCRATCH_FILES,
    WALL_SHARE,
    LimitsConfig,
)
from kernels_eval.errors import EvalError, InstallationError, KilledError, SandboxError
from kernels_eval.installation import AGAIN
from kernels_eval.protocol import Request
from kernels_eval.records import Reason
from kernels_eval.sandbox import machine, process_tree
from kernels_eval.sandbox.channel import (
    Answer,
    Channel,
    ChannelClosed,
    ChannelTimeout,
    Fds,
    Message,
)
from kernels_eval.sandbox.deaths import BLAMED_ROLES
from kernels_eval.sandbox.forkserver import BROKEN
from kernels_eval.sandbox.server_handle import RESTARTED, ForkServer
from kernels_eval.sandbox.trees import disk_usage, remove_tree

POLL_S = 0.1
BY_PROCESSOR = ("capture",)
"""Roles whose deadlines ignore the wait for a processor: load must not change a verdict."""
OF_CANDIDATES = ("candidate", "capture", "sanitizer", "profiled")
"""Roles whose exit status a candidate chooses."""
SCRATCH_POLL_S = 0.5
HEADLESS = "the first thread of the process has ended while others go on"
CHATTER = re.compile(
    r"^(?:(?=[^\n]*Warning: )(?=[^\n]*\bNVML\b)[^\n]*+\n[ \t]+\S[^\n]*"
    r"|(?=[^\n]*\[W)(?=[^\n]*\bNVML\b)[^\n]*|(?=[^\n]*execution_trace_observer\.cpp)[^\n]*)\n?",
    re.MULTILINE,
)
"""Log lines of torch that say nothing of a candidate: about NVML and our record."""


class ChildFailure(Exception):
    """A child did not answer. `detail` says what was seen."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class Child:
    """A forked process serving commands. Use as a context manager: leaving it kills it.

    It reads `scratch` and writes `scratch/work`, its home, which `tmpfs_scratch` hides from others.
    `processes` lets it start programs (Triton's compilers, torch.compile). SIGKILL is a
    KilledError, or a ChildFailure of `BLAMED_ROLES`.
    """

    def __init__(
        self,
        server: ForkServer,
        role: str,
        limits: LimitsConfig,
        *,
        processes: bool = False,
    ) -> None:
        """Raises SandboxError where the fork server fails."""
        self.server, self._limits, self.role = server, limits, role
        most = min(limits.memory_gb * (1 << 30), MEMORY_SHARE * machine.machine_memory_bytes())
        self._memory_bytes = int(most)
        self._clock = process_tree.LookingClock()
        self._scratch_checked, self._whole_at = 0.0, self._clock()
        self.scratch = server.scratch_for(role)
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self.pid: int | None = None
        self.dead: EvalError | ChildFailure | None = None
        self.alone = not processes and "seccomp" in server.isolation
        """Whether it cannot start processes."""
        self._known = list[int]()
        self._is_stopped = False
        self.owed = ""
        """The command it has not answered yet."""
        log = os.open(self.scratch / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        request = {
            "spawn": role,
            "scratch": str(self.scratch),
            "limits": limits.model_dump(),
            "processes": processes,
        }
        try:
            self.pid = server.spawn(request, (theirs.fileno(), log))
        except SandboxError:
            self.close()  # a child that was forked all the same ends with its channel
            raise
        finally:
            theirs.close()
            os.close(log)

    def request(self, request: Request[Any], timeout: float, fds: Fds = ()) -> Answer:
        """Send a request, with descriptors that stay the caller's; return its answer, unread.

        Raises ChildFailure (timeouts are the caller's to rename), KilledError, or SandboxError
        where the fork server died with its children.
        """
        return self.resume(request.message(), timeout, fds)

    def resume(self, message: Message, timeout: float, fds: Fds = ()) -> Answer:
        """Send any message (an answer the child waits for) and wait for the next one. Raises as
        `request`.
        """
        self.begin(message, fds)
        return self.finish(timeout)

    def begin(self, message: Message, fds: Fds = ()) -> None:
        """Send a message without waiting; `finish` waits. Raises as `request`."""
        if self.dead:
            raise self.dead
        command = str(message.get("command", "load"))
        if self.channel.pending():  # it would be taken for the answer to another question
            detail = f"the process answered before it was asked ({command!r})"
            raise self._fail(Reason.EXITED_EARLY, detail)
        try:
            self.channel.send(message, fds)
        except ChannelClosed as error:
            raise self._post_mortem(str(error)) from None
        self.owed = command

    def finish(self, timeout: float) -> Answer:
        """The answer to what was begun, within `timeout` seconds from now. Raises as `request`."""
        if self.dead:
            raise self.dead
        try:
            answer = self._wait(timeout)
        except ChannelTimeout:
            detail = f"no answer to {self.owed!r} within {timeout:g} s"
            raise self._fail(Reason.RUN, detail) from None
        except ChannelClosed as error:
            raise self._post_mortem(str(error)) from None
        self.owed = ""
        if not isinstance(answer, dict):
            detail = "the child answered with something else than a record"
            raise self._fail(Reason.EXITED_EARLY, detail)
        return answer

    def write_file(self, name: str, text: str) -> Path:
        path = self.scratch / name
        path.write_text(text, encoding="utf-8", errors="replace")
        return path

    @property
    def gone(self) -> bool:
        return self.dead is not None or self.pid is None or process_tree.has_ended(self.pid)

    def _wait(self, timeout: float) -> object:
        work = self._work(timeout)
        ends = self._clock() + timeout * (WALL_SHARE if work else 1)
        while True:
            try:
                return self.channel.receive(min(POLL_S, max(0.0, ends - self._clock())))
            except ChannelTimeout:
                if self._clock() >= ends or (work and work.passed(self.pid)):
                    raise
            if self.pid is not None:
                self._watch(self.pid)

    def _work(self, timeout: float) -> process_tree.Deadline | None:
        """A deadline in processor time and sleep; None where the clock alone counts."""
        if self.pid is None or self.role not in BY_PROCESSOR:
            return None
        return process_tree.Deadline(timeout, -process_tree.processor_s(self.pid))

    def _watch(self, pid: int) -> None:
        if process_tree.has_ended(pid):  # its orphans can keep the channel open
            raise self._post_mortem("only descendants were left")
        now = self._clock()
        if not any(map(process_tree.headless, process_tree.descendants(pid))):
            self._whole_at = now
        elif now > self._whole_at + HEADLESS_S:
            raise self._fail(Reason.EXITED_EARLY, HEADLESS)
        limits, used, limit = self._limits, process_tree.usage(pid), self._memory_bytes
        # Resident memory counts what forked children share; reading the exact share is slow.
        if used.resident_bytes > limit and process_tree.proportional_memory(pid) > limit:
            detail = f"resident memory above the limit of {limit / (1 << 30):.3g} GB"
            raise self._fail(Reason.OUT_OF_MEMORY, detail)
        for what in ("processes", "threads"):
            count, most = getattr(used, what) - 1, getattr(limits, what)  # one is the keeper's
            if count > most:
                raise self._fail(Reason.CRASHED, f"killed: {count} {what}, the limit is {most}")
        watched = "scratch_watch" in self.server.isolation
        if watched and now > self._scratch_checked + SCRATCH_POLL_S:
            size, files = disk_usage(self.scratch / "work", SCRATCH_FILES)
            self._scratch_checked = self._clock()
            if size > limits.scratch_mb << 20 or files > SCRATCH_FILES:
                count = "uncountable" if files > SCRATCH_FILES else files
                seen = f"{count} files of {size >> 20} MB, the limit is {limits.scratch_mb} MB"
                raise self._fail(Reason.CRASHED, f"killed: {seen}")

    def _fail(self, reason: Reason, detail: str) -> ChildFailure:
        self.dead = failure = ChildFailure(reason, detail)
        self.kill()
        return failure

    def _post_mortem(self, error: str) -> EvalError | ChildFailure:
        code, cpu_s = self.server.reap(self.pid)
        self.pid = None
        self.dead = self._cause(code, cpu_s, error)
        return self.dead

    def _cause(self, code: int | None, cpu_s: float, error: str) -> EvalError | ChildFailure:
        limit_s = self._limits.cpu_s
        if code is None and not self.server.alive:
            lost = "the fork server was killed, and its children with it"
            return SandboxError(lost, RESTARTED)
        if code is None:
            detail = f"the process gave up its channel and kept running ({error})"
            return ChildFailure(Reason.EXITED_EARLY, detail)
        if code in (-signal.SIGKILL, -signal.SIGXCPU) and cpu_s >= limit_s:
            detail = f"used {cpu_s:.0f} s of processor time, the limit is {limit_s} s"
            return ChildFailure(Reason.RUN, detail)
        if code == -signal.SIGKILL and self.role not in BLAMED_ROLES.get():
            killed = f"the {self.role} process was killed by SIGKILL"
            return KilledError(killed, "see whether dmesg names the OOM killer", self.role)
        if code == BROKEN and self.role not in OF_CANDIDATES:
            said = self.log_tail(LOG_BYTES).strip().rpartition("\n")[2]
            return InstallationError(f"the {self.role} process: {said}", AGAIN)
        if code < 0:
            name = signal.Signals(-code).name if -code in list(signal.Signals) else str(-code)
            return ChildFailure(Reason.CRASHED, f"the process was killed by {name}")
        detail = f"the process ended by itself with status {code} ({error})"
        return ChildFailure(Reason.EXITED_EARLY, detail)

    def processor_ns(self) -> int:
        """Nanoseconds of processor time of this child's tree, ended threads included; 0 where
        unknown. The child cannot change what it reads.
        """
        total = 0
        for pid in self._family():
            with suppress(OSError):  # it has just ended
                # the CPU-time clock of a process, see clock_getcpuclockid(3)
                total += time.clock_gettime_ns(~pid << 3 | 2)
        return total

    def demand_ns(self) -> tuple[int, int]:
        """Nanoseconds that living threads of the tree ran, and were ready to and waited for a
        processor (schedstat); 0 where unknown.
        """
        ran = waited = 0
        for path in self.thread_files("schedstat"):
            with suppress(OSError, ValueError):  # a thread that has just ended
                each = path.read_text().split()
                ran, waited = ran + int(each[0]), waited + int(each[1])
        return ran, waited

    @contextmanager
    def stopped(self, known: Sequence[int] = ()) -> Iterator[None]:
        """Stop all of this child for the block, `known` family members first: others take long to
        find.
        """
        if self._is_stopped:
            yield
            return
        stopped, found = list[int](), [*known] or self.family()
        self._is_stopped = True
        try:
            while found:
                stopped += found
                _signal(found, signal.SIGSTOP)
                # what was started meanwhile
                found = [pid for pid in self.family() if pid not in stopped]
            yield
        finally:
            self._is_stopped = False
            _signal(stopped, signal.SIGCONT)

    def family(self) -> list[int]:
        """Processes that run this child's code: all but its keeper."""
        if self.pid is None or not self.alone or not self._known:
            self._known = [*self._family()[1:]]
        return self._known

    def _family(self) -> tuple[int, ...]:
        return (self.pid, *process_tree.descendants(self.pid)) if self.pid else ()

    def thread_files(self, name: str) -> list[Path]:
        """Files of this name in /proc for the threads of this child and its descendants."""
        folders = [Path(f"/proc/{pid}/task") for pid in self._family()]
        return [path for folder in folders for path in folder.glob(f"*/{name}")]

    def log_tail(self, count: int) -> str:
        try:
            with open(self.scratch / "log", "rb", opener=_at_once) as handle:
                handle.seek(max(0, handle.seek(0, os.SEEK_END) - count))
                return CHATTER.sub("", handle.read().decode("utf-8", "replace"))
        except OSError:
            return ""

    def kill(self) -> None:
        if self.pid is not None:
            self.server.kill(self.pid)
            self.pid = None

    def close(self) -> None:
        self.kill()
        self.channel.close()
        remove_tree(self.scratch)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _at_once(path: str, flags: int) -> int:
    """Open what a candidate may have put there: no link is followed, no pipe waited for."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


@contextmanager
def on_one_core(children: Sequence[Child]) -> Iterator[None]:
    """Keep children that work in turns on the core of the first one for the block: what a launch
    costs depends on the core, and on what its neighbour does.
    """
    former: dict[int, set[int]] = {}
    threads = [int(path.parent.name) for child in children for path in child.thread_files("stat")]
    core = {_core_of(children[0].family()[-1])} if children else set[int]()
    for thread in threads:
        with suppress(OSError):  # it has ended
            former[thread] = os.sched_getaffinity(thread)
            os.sched_setaffinity(thread, core)
    try:
        yield
    finally:
        for thread, cores in former.items():
            with suppress(OSError):
                os.sched_setaffinity(thread, cores)


def _core_of(pid: int) -> int:
    """The core that a process's first thread ran on last ("processor" of proc_pid_stat(5))."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[36])


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(OSError):  # it has ended
            os.kill(pid, number)
