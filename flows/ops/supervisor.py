"""The process that keeps a stack alive: starts its parts, starts one again that has died, and stops
them all when it is told to.

Guarantees: a part that dies is started again, after `BACKOFF_S` and then twice that each time,
until it has died `DEATHS` times within `WINDOW_S`; then it is `failed`, the others go on, and
SIGHUP tries it once more. What a dead server or Ray head left behind is killed first; flow runs of
a dead worker go on, and those whose process is gone get their end in Prefect. Parts outlive a
supervisor that is killed, and the next one takes them over. A log stays below `LOG_BYTES`, with one
file before it. Does not restart a part that lives but does not answer: it is `unhealthy`, and may
only be busy.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from flows.ops.health import fault
from flows.ops.parts import Program, mlflow_auth_file, programs
from flows.ops.places import PartState, Phase, Places, StackState, write_private, write_state
from flows.ops.processes import Identity, alive, identify, members, send, wait_gone
from flows.ops.runs import Runs, settling
from flows.ops.settings import Part, Secrets, StackSettings, load_secrets
from flows.ops.stopping import stop_parts

PR_SET_CHILD_SUBREAPER = 36
BACKOFF_S, BACKOFF_MOST_S = 0.5, 30.0
DEATHS, WINDOW_S = 5, 600.0
DEATHS_AT_FIRST = 3
"""A part that was never well will hardly become so; Ray gives up after 30 s where a machine is
busy."""
ASK_SOON_S, ASK_S = 0.25, 5.0
TICK_S = 1.0
LOG_BYTES = 20_000_000


@dataclass
class Kept:
    """One part as the supervisor sees it."""

    program: Program
    identity: Identity | None = None
    family: list[Identity] = field(default_factory=list)
    since: float = 0.0
    restarts: int = 0
    deaths: list[float] = field(default_factory=list)
    start_at: float = 0.0
    was_well: bool = False
    failed: bool = False
    reason: str = "not started yet"
    answer: tuple[Identity | None, str | None] = (None, None)
    """Which process was asked, and why it is not well."""

    @property
    def well(self) -> bool:
        return self.identity is not None and self.answer == (self.identity, None)

    def state(self) -> PartState:
        phase: Phase = (
            "healthy"
            if self.well
            else (
                "failed"
                if self.failed
                else "restarting"
                if self.deaths and not self.identity
                else "waiting"
            )
        )
        reason = self.reason
        if self.identity and not self.well:
            phase = "unhealthy" if self.was_well else "starting"
            reason = self.answer[1] or "" if self.answer[0] == self.identity else ""
        below = len(self.family) if self.identity else 0
        return PartState(
            phase=phase,
            identity=self.identity,
            since=self.since,
            restarts=self.restarts,
            processes=below,
            reason="" if self.well else reason,
        )


class Supervisor:
    """Keeps the stack of one root. `run` returns when it was told to stop and nothing of it is
    left."""

    def __init__(
        self,
        places: Places,
        settings: StackSettings,
        secrets: Secrets,
        adopted: dict[Part, PartState],
        say: Callable[[str], None],
    ) -> None:
        self._places, self._settings, self._secrets, self._say = places, settings, secrets, say
        self._kept = {
            program.part: Kept(program) for program in programs(places, settings, secrets)
        }
        self._runs = Runs(places, settings, secrets)
        self._statuses: dict[int, int] = {}
        self._told: dict[str, Identity | None] = {}
        for part, kept in self._kept.items():
            if (state := adopted.get(part)) and state.identity and alive(state.identity):
                kept.identity, kept.since, kept.restarts, kept.was_well = (
                    state.identity,
                    state.since,
                    state.restarts,
                    True,
                )
                say(f"{part}: taken over, process {state.identity.pid}")
            elif state and state.identity:
                self._kill_rest(part, state.identity, [])
        self._me = identify(os.getpid())
        self._published: StackState | None = None
        self._stop, self._halt, self._notified = False, threading.Event(), False
        self._wake_read, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self) -> list[Identity]:
        """Returns the processes that could not be stopped."""
        ctypes.CDLL(None).prctl(
            PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0
        )  # what a part leaves behind becomes a child of this process
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # each wakes the loop through the pipe
        askers = [
            threading.Thread(target=self._ask, args=(kept,), daemon=True)
            for kept in self._kept.values()
        ]
        for thread in askers:
            thread.start()
        ticked = 0.0
        while not self._stop:
            self._start_what_is_due()
            self.publish()
            self._wait()
            self._reap()
            for kept in self._kept.values():
                if kept.identity and not alive(kept.identity):
                    self._died(kept)
            if time.monotonic() - ticked >= TICK_S:
                ticked = time.monotonic()
                self._tick()
        self._halt.set()
        notify("STOPPING=1")
        self._say("stopping")
        parts = {part: kept.identity for part, kept in self._kept.items()}
        left = stop_parts(
            self._places,
            parts,
            {part: kept.family for part, kept in self._kept.items()},
            self._runs,
            self._reap,
            self._say,
        )
        if not left:
            clean(self._places)
        self._say(
            "stopped"
            if not left
            else f"could not be stopped: {', '.join(str(one.pid) for one in left)}"
        )
        return left

    def _start_what_is_due(self) -> None:
        now = time.monotonic()
        for kept in self._kept.values():
            if kept.identity or kept.failed or now < kept.start_at:
                continue
            if kept.program.part == "worker" and not self._kept["prefect"].well:
                kept.reason = "waits for Prefect"
                continue
            self._start(kept)

    def _start(self, kept: Kept) -> None:
        part = kept.program.part
        try:
            with open(self._places.log(part), "ab") as log:
                log.write(f"--- {time.strftime('%Y-%m-%dT%H:%M:%S%z')} start\n".encode())
                log.flush()
                started = subprocess.Popen(
                    kept.program.command,
                    env=kept.program.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:  # a full disk, no more processes
            kept.reason = f"cannot be started: {error.strerror}"
            self._again_later(kept)
            return
        started.returncode = (
            0  # collected below, with everybody's children; Popen must not look for it
        )
        kept.identity, kept.since = identify(started.pid), time.time()
        self._say(f"{part}: started, process {started.pid}")

    def _died(self, kept: Kept) -> None:
        part, identity = kept.program.part, kept.identity
        assert identity is not None
        self._collect(identity.pid)
        how = self._statuses.pop(identity.pid, None)
        kept.reason = (
            "ended"
            if how is None
            else f"ended with status {how}"
            if how >= 0
            else f"ended by {signal.Signals(-how).name}"
        )
        self._say(f"{part}: process {identity.pid} {kept.reason}")
        if part != "worker":
            self._kill_rest(part, identity, kept.family)
        kept.identity, kept.answer = None, (None, None)
        kept.restarts += 1
        self._again_later(kept)

    def _collect(self, pid: int) -> None:
        """A process that is seen to have ended may have threads that have not, and no status until
        then."""
        with suppress(OSError):
            handle = os.pidfd_open(pid)
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            poll.poll(2000)
            os.close(handle)
        self._reap()

    def _again_later(self, kept: Kept) -> None:
        now = time.monotonic()
        kept.deaths = [then for then in kept.deaths if now - then < WINDOW_S] + [now]
        most = DEATHS if kept.was_well else DEATHS_AT_FIRST
        if len(kept.deaths) >= most:
            kept.failed = True
            kept.reason += (
                f"; {len(kept.deaths)} times within {WINDOW_S / 60:.0f} minutes, so it is left"
                " alone"
            )
            self._say(f"{kept.program.part}: {kept.reason}")
            return
        kept.start_at = now + min(BACKOFF_MOST_S, BACKOFF_S * 2 ** (len(kept.deaths) - 1))

    def _kill_rest(self, part: Part, leader: Identity, family: list[Identity]) -> None:
        rest = [
            one
            for one in {one.pid: one for one in [*members(None, [leader]), *family]}.values()
            if alive(one)
        ]
        for one in rest:
            send(one, signal.SIGKILL)
        if left := wait_gone(rest, 5.0, self._reap):
            self._say(
                f"{part}: left behind and cannot be killed:"
                f" {', '.join(str(one.pid) for one in left)}"
            )

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                self._statuses[found[0]] = os.waitstatus_to_exitcode(found[1])
                if len(self._statuses) > 1000:
                    self._statuses.clear()

    def _wait(self) -> None:
        poll, handles = select.poll(), []
        poll.register(self._wake_read, select.POLLIN)
        for kept in self._kept.values():  # parts that were taken over are nobody's children here
            if kept.identity:
                with suppress(OSError):
                    handles.append(os.pidfd_open(kept.identity.pid))
                    poll.register(handles[-1], select.POLLIN)
        poll.poll(TICK_S * 1000)
        for handle in handles:
            os.close(handle)
        with suppress(BlockingIOError):
            said = set(os.read(self._wake_read, 4096))
            self._stop = self._stop or bool(said & {signal.SIGTERM, signal.SIGINT})
            if signal.SIGHUP in said:
                for kept in self._kept.values():
                    if kept.failed:
                        kept.failed, kept.deaths, kept.start_at = False, [], 0.0

    def _ask(self, kept: Kept) -> None:
        """In a thread of its own: one that answers slowly delays no other."""
        while not self._halt.is_set():
            identity = kept.identity
            if identity:
                try:
                    found = fault(
                        kept.program.part, self._places, self._settings, self._secrets, kept.since
                    )
                    if kept.program.part == "worker" and found is None:
                        settling(self._runs, self._say)
                except Exception as error:  # an answer that nobody foresaw must not end this thread
                    found = f"its answer is not understood: {type(error).__name__}: {error}"
                changed = kept.answer != (identity, found)
                kept.answer = (identity, found)
                if found is None:
                    kept.was_well = True
                if changed:
                    with suppress(BlockingIOError):
                        os.write(self._wake, b"\0")
            self._halt.wait(ASK_S if kept.well else ASK_SOON_S)

    def _tick(self) -> None:
        for part, kept in self._kept.items():
            if kept.identity:
                kept.family = members(None, [kept.identity])
                if part == "worker":
                    self._runs.see(kept.family)
        for name in [*self._kept, "supervisor"]:
            bound(self._places.log(name), LOG_BYTES)

    def publish(self) -> None:
        """Write the state file where something has changed, and tell systemd the first time that
        all is well."""
        assert self._me is not None
        state = StackState(
            user=os.getuid(),
            root=str(self._places.root),
            settings=self._settings,
            supervisor=self._me,
            authenticated=bool(self._secrets.prefect or self._secrets.mlflow),
            parts={part: kept.state() for part, kept in self._kept.items()},
        )
        if state == self._published:
            return
        try:
            write_state(self._places, state)
            self._published = state
        except OSError as error:  # a full disk ends no part
            self._say(f"cannot write {self._places.state}: {error.strerror}")
        for part, now in state.parts.items():
            if now.phase == "healthy":
                self._tell_once(part, now)
        if not self._notified and all(now.phase == "healthy" for now in state.parts.values()):
            self._notified = True
            notify("READY=1")
            self._say("all parts are healthy")

    def _tell_once(self, part: str, state: PartState) -> None:
        if self._told.get(part) != state.identity:
            self._told[part] = state.identity
            self._say(f"{part}: healthy after {time.time() - state.since:.1f} s")


def prepare(places: Places, settings: StackSettings, secrets: Secrets) -> None:
    """The files that parts read when they start. Raises OSError, and UsageError where somebody else
    made the temporary directory."""
    import secrets as random

    from kernels_eval.errors import UsageError

    places.temporary.mkdir(mode=0o700, exist_ok=True)
    held = places.temporary.lstat()
    if places.temporary.is_symlink() or held.st_uid != os.getuid() or held.st_mode & 0o077:
        raise UsageError(
            f"{places.temporary} is not this user's alone",
            "remove it, or set TMPDIR to another directory",
        )
    for place in (places.ray, places.runs):
        place.mkdir(mode=0o700, exist_ok=True)
    if "ray" in settings.parts and not places.ray_token.exists():
        write_private(places.ray_token, random.token_hex(32).encode())
    if secrets.mlflow:
        write_private(places.stack / "mlflow-auth.ini", mlflow_auth_file(places))


def clean(places: Places) -> None:
    """Remove what says that a stack runs. Databases and logs stay."""
    for path in (places.state, places.ray_token, places.stack / "mlflow-auth.ini"):
        path.unlink(missing_ok=True)
    for path in places.stack.glob("*.tmp"):
        path.unlink(missing_ok=True)
    shutil.rmtree(places.temporary, ignore_errors=True)


def bound(log: Path, limit_bytes: int) -> None:
    """Move a log that is too long to `.1`. The parts hold it open for appending, so it is copied
    and cut; a line may be lost between."""
    with suppress(OSError):
        if log.stat().st_size > limit_bytes:
            shutil.copyfile(log, f"{log}.1")
            Path(f"{log}.1").chmod(0o600)
            os.truncate(log, 0)


def notify(message: str) -> None:
    """Tell systemd, where it asked to be told."""
    place = os.environ.get("NOTIFY_SOCKET")
    if place:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
            told.connect("\0" + place[1:] if place.startswith("@") else place)
            told.send(message.encode())


def say(line: str) -> None:
    with suppress(OSError):
        print(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {line}", flush=True)


def main() -> None:
    os.umask(0o077)
    told = json.loads(sys.stdin.readline())
    settings = StackSettings.model_validate(told["settings"])
    adopted = {part: PartState.model_validate(state) for part, state in told["adopted"].items()}
    left = Supervisor(Places(told["root"]), settings, load_secrets(settings), adopted, say).run()
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    main()
