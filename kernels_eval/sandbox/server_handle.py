"""The parent's handle on the fork server, which starts children.

Guarantees: every wait has a deadline; a dead fork server costs no verdict.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kernels_eval.errors import SandboxError
from kernels_eval.sandbox import process_tree
from kernels_eval.sandbox.channel import (
    Answer,
    Channel,
    ChannelClosed,
    ChannelTimeout,
    Fds,
    Message,
)
from kernels_eval.sandbox.server_process import ServerProcess
from kernels_eval.toolchain import default_cache, places_of

START_S, ANSWER_S, ENDS_S = 180.0, 30.0, 5.0
"""Seconds for the fork server to start, and to answer; and for a killed child to end by itself."""
RESTARTED = "it is started again with the next candidate"


class End(NamedTuple):
    """A child's exit status (negative: signal) and processor seconds; None: it had to be killed, or
    unknown.
    """

    status: int | None = None
    cpu_s: float = 0.0


class ForkServer:
    """A process that imports torch, never touches a GPU, and forks children in milliseconds.

    It starts beside its caller's work. `readable`: directories whose files open by name, unlisted;
    default: the build cache. `warm`: a role ("workload") whose slow first use of torch is done
    once. `started`: its process, if it runs.
    """

    def __init__(
        self,
        *,
        threads: int = 1,
        readable: Sequence[Path] | None = None,
        warm: str = "",
        started: ServerProcess | None = None,
    ) -> None:
        self._started = started or ServerProcess(threads=threads, warm=warm)
        self.base, self.process = self._started.base, self._started.process
        caches = (default_cache(),) if readable is None else readable
        self._readable = [str(path) for cache in caches for path in places_of(cache)]
        self.channel = Channel(self._started.socket)
        self._lock = threading.RLock()  # the warm pool starts and ends children in a thread
        self._closed = False
        self._isolation: tuple[str, ...] = ()

    @property
    def has_started(self) -> bool:
        return bool(self._isolation)

    def start(self) -> None:
        """Wait for the start. Raises SandboxError where there was none."""
        self._wait_started()

    @property
    def isolation(self) -> tuple[str, ...]:
        """The active layers; waits for the start. Raises SandboxError where there was none."""
        self._wait_started()
        return self._isolation

    def _wait_started(self) -> None:
        with self._lock:
            if not self._isolation:
                self._isolation = self._first_answer()

    def _first_answer(self) -> tuple[str, ...]:
        if self._closed:
            raise SandboxError("the fork server is closed", RESTARTED)
        try:
            return tuple(map(str, self.channel.receive_record(START_S)["isolation"]))
        except (ChannelClosed, ChannelTimeout) as error:
            tail = self._started.log.read_text(errors="replace")[-2000:]
            self.close()
            raise SandboxError(
                f"the fork server did not start: {error}. {tail}", "concur doctor"
            ) from error

    def scratch_for(self, role: str) -> Path:
        """A folder for one child. Raises SandboxError where this server is closed."""
        try:
            scratch = Path(tempfile.mkdtemp(prefix=f"{role}-", dir=self.base))
            (scratch / "work").mkdir(mode=0o700)
        except FileNotFoundError as error:
            gone = "the fork server is gone, and its folders with it"
            raise SandboxError(gone, RESTARTED) from error
        return scratch

    def spawn(self, request: Message, fds: Fds) -> int:
        try:
            request |= {"readable": self._readable}
            return int(self._request(request, fds)["pid"])
        except (ChannelClosed, ChannelTimeout, KeyError) as error:
            # Whatever it still answers would be taken for the answer to another question.
            self.close()
            raise SandboxError(f"the fork server is gone: {error}", RESTARTED) from error

    def reap(self, pid: int | None) -> End:
        return self._end_of("wait", pid)

    def kill(self, pid: int) -> None:
        if self.alive:
            with suppress(ChannelClosed, ChannelTimeout, ProcessLookupError):
                if self._request({"kill": pid})["ending"]:
                    process_tree.ends_within(pid, ENDS_S)  # the server serves others meanwhile
            self._end_of("end", pid)
        else:
            process_tree.kill_descendants(pid)

    def _end_of(self, question: str, pid: int | None) -> End:
        if pid is None:
            return End()
        try:
            return End(**self._request({question: pid}))
        except (ChannelClosed, ChannelTimeout):
            self.close()
            return End()

    def _request(self, message: Message, fds: Fds = ()) -> Answer:
        with self._lock:
            self._wait_started()  # its first message is no answer
            self.channel.send(message, fds)
            return self.channel.receive_record(ANSWER_S)

    @property
    def alive(self) -> bool:
        return not self._closed and self.process.poll() is None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._started.close()
