"""The parent's side of isolation: a fork server, and one disposable child per candidate.

Guarantees: every wait has a deadline; a child that hangs, dies or exceeds its memory is killed with all of its descendants (its PID
namespace where the kernel offers one, its process group otherwise); a dead child costs its own verdict only. What the layers in force
are is probed once and recorded. Does not guarantee anything about what native code does to its own process: see docs.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernels_eval.config import LimitsConfig
from kernels_eval.errors import SandboxError
from kernels_eval.isolation.channel import Channel, ChannelClosed, ChannelTimeout

POLL_S = 0.1


class ChildFailure(Exception):
    """A child did not answer. `reason` is a verdict reason; `detail` says what was seen."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class Child:
    """A forked process serving commands. Use as a context manager: leaving it kills it."""

    def __init__(self, server: ForkServer, role: str, limits: LimitsConfig, exchange_bytes: int = 0) -> None:
        self._server, self._limits = server, limits
        self.scratch = Path(tempfile.mkdtemp(prefix=f"{role}-", dir=server.base))
        self._log = self.scratch / "log"
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self.exchange_path = (
            server.shared / f"{self.scratch.name}.bytes"
        )  # in memory, outside the child's scratch: it gets the descriptor only
        self.exchange = os.open(self.exchange_path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(self.exchange, max(exchange_bytes, 1))
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self.pid: int | None = server.spawn(role, str(self.scratch), limits, (theirs.fileno(), log, self.exchange))
        finally:
            theirs.close()
            os.close(log)
        self.dead: ChildFailure | None = None

    def request(self, command: str, *, timeout: float, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its answer. Raises ChildFailure: timeout reasons are the caller's to rename."""
        return self.resume({"command": command, **arguments}, timeout, command)

    def resume(self, message: dict[str, Any], timeout: float, command: str = "load") -> dict[str, Any]:
        """Send any message (an answer the child waits for) and wait for what it says next. Raises ChildFailure."""
        if self.dead:
            raise self.dead
        try:
            self.channel.send(message)
            answer = self._wait(timeout)
        except ChannelTimeout:
            raise self._fail("run", f"no answer to {command!r} within {timeout:g} s") from None
        except ChannelClosed as error:
            raise self._fail(*self._post_mortem(str(error))) from None
        if not isinstance(answer, dict):
            raise self._fail("exited_early", "the child answered with something that is not a record")
        return answer

    def _wait(self, timeout: float) -> Any:
        import psutil

        deadline = time.monotonic() + timeout
        limit = self._limits.memory_gb * (1 << 30)
        while True:
            try:
                return self.channel.receive(min(POLL_S, max(0.0, deadline - time.monotonic())))
            except ChannelTimeout:
                if time.monotonic() >= deadline:
                    raise
            try:
                top = psutil.Process(self.pid)
                family = [top, *top.children(recursive=True)]
                used = sum(p.memory_info().rss for p in family)
            except psutil.Error:
                continue
            if used > limit and sum(_proportional_memory(p.pid) for p in family) > limit:
                raise self._fail("out_of_memory", f"resident memory above the limit of {self._limits.memory_gb:g} GB")

    def _fail(self, reason: str, detail: str) -> ChildFailure:
        self.dead = ChildFailure(reason, detail)
        self.kill()
        return self.dead

    def _post_mortem(self, error: str) -> tuple[str, str]:
        code = self._server.reap(self.pid)
        self.pid = None
        if code is None:
            return "exited_early", f"the process gave up its channel and went on by itself ({error})"
        if code < 0:
            name = signal.Signals(-code).name if -code in list(signal.Signals) else str(-code)
            return "crashed", f"the process was killed by {name}"
        return "exited_early", f"the process ended by itself with status {code} ({error})"

    def cpu_clock(self) -> Callable[[], int] | None:
        """A clock of the nanoseconds this child and its descendants have spent on a processor, as the kernel accounts them (schedstat).

        None where the kernel does not tell. Nothing inside the child can change what it reads.
        """
        import psutil

        def read() -> int:
            total = 0
            top = psutil.Process(self.pid)
            for path in (
                p for process in [top, *top.children(recursive=True)] for p in Path(f"/proc/{process.pid}/task").glob("*/schedstat")
            ):
                try:
                    total += int(path.read_text().split()[0])
                except OSError:
                    continue  # a thread that has just ended
            return total

        try:
            return read if read() > 0 else None
        except (ValueError, IndexError, psutil.Error):
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
            for kill in (os.killpg, os.kill):
                try:
                    kill(self.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self._server.reap(self.pid)
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
    """A process that has imported torch and never touches a GPU; forks children in milliseconds. Raises SandboxError where it fails."""

    def __init__(self, *, threads: int = 1, start_timeout_s: float = 180) -> None:
        _sweep()
        self.base = Path(tempfile.mkdtemp(prefix=f"concur-{os.getpid()}-"))
        memory = Path("/dev/shm")
        self.shared = Path(tempfile.mkdtemp(prefix=f"concur-{os.getpid()}-", dir=memory if os.access(memory, os.W_OK) else None))
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self._closed = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kernels_eval.isolation.forkserver", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env=child_environment(threads),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=open(self.base / "forkserver.log", "wb"),
            start_new_session=True,
        )
        theirs.close()
        try:
            self.isolation: tuple[str, ...] = tuple(self.channel.receive(start_timeout_s)["isolation"])
        except (ChannelClosed, ChannelTimeout) as error:
            log = (self.base / "forkserver.log").read_text(errors="replace")[-2000:]
            self.close()
            raise SandboxError(f"the fork server did not start: {error}. {log}", "concur doctor") from error

    def spawn(self, role: str, scratch: str, limits: LimitsConfig, fds: tuple[int, ...]) -> int:
        try:
            self.channel.send({"spawn": role, "scratch": scratch, "limits": limits.model_dump()}, fds)
            return int(self.channel.receive(30)["pid"])
        except (ChannelClosed, ChannelTimeout, KeyError) as error:
            self.close()  # whatever it still answers would be taken for the answer to another question
            raise SandboxError(f"the fork server is gone: {error}", "it is started again with the next candidate") from error

    def reap(self, pid: int | None) -> int | None:
        """Exit status of a child that has ended (negative: signal), as subprocess gives it. None where the server is gone."""
        if pid is None:
            return None
        try:
            self.channel.send({"wait": pid})
            return self.channel.receive(30).get("status")
        except (ChannelClosed, ChannelTimeout):
            self.close()
            return None

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


def _proportional_memory(pid: int) -> int:
    """Bytes of a process with shared pages divided among those who share them (PSS): forked children share most of theirs."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0


def _sweep() -> None:
    """Remove what fork servers of processes that are gone (SIGKILL) left behind."""
    import psutil

    for base in {Path(tempfile.gettempdir()), Path("/dev/shm")}:
        for left in base.glob("concur-*-*"):
            owner = left.name.split("-")[1]
            if owner.isdigit() and not psutil.pid_exists(int(owner)):
                shutil.rmtree(left, ignore_errors=True)


def child_environment(threads: int) -> dict[str, str]:
    """The whole environment of the fork server and all children: nothing of the user's own but what finds Python, CUDA and a home."""
    kept = ("PATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "VIRTUAL_ENV", "PYTHONPATH", "TZ")
    package_root = str(Path(__file__).parents[2])
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, environment.get("PYTHONPATH")]))
    return environment | {
        "LC_ALL": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # without it, importing torch.utils.cpp_extension poisons forked children
        "CUDA_MODULE_LOADING": "LAZY",
        **{name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")},
    }
