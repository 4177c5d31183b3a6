"""Runs compilers: one bounded process group each, in a folder of this process.

Guarantees: hanging or abandoned compilers are killed with their children; one killed from outside
is a KilledError; want of disk is a `DiskFullError`, which compiler messages cannot fake.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import psutil

from kernels_eval.config import COMPILER_BYTES, FILE_LIMIT_BYTES, LOG_BYTES, ROOM_BYTES
from kernels_eval.errors import DiskFullError, KilledError
from kernels_eval.sandbox import process_tree, reaper
from kernels_eval.sandbox.deaths import BLAMED_ROLES, COMPILER
from kernels_eval.sandbox.process_tree import Deadline
from kernels_eval.sandbox.syscalls import PR_SET_CHILD_SUBREAPER, prctl
from kernels_eval.sandbox.trees import remove_tree

READ_BYTES = 1 << 20
POLL_S = 0.25
FULL = (errno.ENOSPC, errno.EDQUOT)
SAYS_FULL = re.compile(r"No space left on device|Disk quota exceeded")
COMPILER_WAS_KILLED = re.compile(
    r"^(\S{1,500}: fatal error: (Killed signal terminated program"
    r"|\S{1,500} terminated with signal 9)"
    r"|nvcc error\s*: .* died due to signal 9"
    r"|\S{0,500}clang\S{0,50}: error: unable to execute command: Killed)",
    re.MULTILINE,
)
"""What drivers write about a killed program; faking it only costs a few compilations."""
ERROR_LINE = re.compile(
    r"\berror\b|undefined reference|multiple definition|cannot find|fatal", re.ASCII
)

Outcome = Literal["ok", "failed", "timeout", "killed"]


def run(
    command: Sequence[str],
    work: Path,
    deadline: Deadline,
    environment: dict[str, str],
    confine: Callable[[], None] | None = None,
) -> Outcome:
    """Run a compiler in `work`, log to `work/log`, and charge `deadline`.

    "timeout": the deadline passed. "killed": by SIGKILL, where compilers are to blame
    (`sandbox.deaths`); else raises KilledError.
    """
    log = work / "log"
    log.touch()
    logged = log.stat().st_size
    if deadline.passed():
        return "timeout"
    returncode = _returncode(command, work, deadline, environment, confine)
    if returncode is None or deadline.passed():
        return "timeout"
    said = _read(log, logged)
    killed = was_killed(returncode, said)
    # Another signal and not a word: a fork of a process with many threads can die before its exec,
    # while a compiler that crashes on its source names it.
    if killed or (returncode < 0 and not said.strip()):
        if COMPILER not in BLAMED_ROLES.get():
            what = f"{command[0]} was killed by signal {-returncode if returncode < 0 else 9}"
            raise KilledError(what, "see whether dmesg names the OOM killer", COMPILER)
        return "killed" if killed else "failed"
    return "failed" if returncode else "ok"


def was_killed(returncode: int, log: str) -> bool:
    """Whether a compiler, or (by its log) a program of its own, died of SIGKILL."""
    return returncode == -signal.SIGKILL or bool(returncode and COMPILER_WAS_KILLED.search(log))


def _returncode(
    command: Sequence[str],
    work: Path,
    deadline: Deadline,
    environment: dict[str, str],
    confine: Callable[[], None] | None,
) -> int | None:
    descriptor = reaper.reaper()

    def prepare() -> None:
        reaper.register(descriptor)
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # whatever it starts stays in its tree, and is counted
        limit_compiler()
        if confine is not None:
            confine()

    with open(work / "log", "ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=work,
            env={**environment, "TMPDIR": str(work)},
            start_new_session=True,
            preexec_fn=prepare,
        )
        try:
            while not process_tree.ends_within(process.pid, POLL_S):
                if deadline.passed(process.pid):
                    break
        finally:
            deadline.spent_s += process_tree.processor_s(process.pid)  # a zombie still tells
            returncode = process.poll()
            if returncode is None:
                process_tree.kill_descendants(process.pid)
            # A compiler that was killed leaves what it had started.
            if returncode is None or returncode < 0:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            reaper.unregister(descriptor, process.pid)
        return returncode


def limit_compiler(file_bytes: int = FILE_LIMIT_BYTES) -> None:
    """Forbid core files, files above `file_bytes` and COMPILER_BYTES of memory; a second call can
    only lower that.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_AS, (COMPILER_BYTES, COMPILER_BYTES))


class WorkRoot:
    """`work-<pid>-<uuid>/` under the cache: where this process builds. A fork gets its own."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self._pid = 0

    @property
    def path(self) -> Path:
        if self._pid != os.getpid():
            self.cache.mkdir(parents=True, exist_ok=True)
            remove_abandoned(self.cache)
            self._path = self.cache / f"work-{os.getpid()}-{uuid.uuid4().hex}"
            self._path.mkdir()
            self._handle = open(self._path / ".lock", "w")
            fcntl.flock(self._handle, fcntl.LOCK_EX)
            self._pid = os.getpid()
            weakref.finalize(self, _remove, self._path, self._pid)
        return self._path


def remove_abandoned(cache: Path) -> None:
    """Remove work roots without a process here and with a free lock (machines may share a cache),
    after their compilers.
    """
    for root in cache.resolve().glob("work-*-*"):
        owner = re.fullmatch(r"work-([0-9]+)-[0-9a-f]{32}", root.name)
        gone = owner and not os.path.exists(f"/proc/{owner[1]}")  # of any number of digits
        if gone and _unlocked(root / ".lock"):
            for process in psutil.process_iter():
                with suppress(psutil.Error, OSError):  # another user's, or one that has just ended
                    if root in Path(process.cwd()).parents:
                        process.kill()
            remove_tree(root)


def _unlocked(path: Path) -> bool:
    try:
        with open(path) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return True


def _remove(path: Path, pid: int) -> None:
    if pid == os.getpid():  # a forked child leaves its parent's root alone
        remove_tree(path)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock that dies with its holder; torch's FileBaton can hang."""
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def log_of(work: Path) -> str:
    log = work / "log"
    return _read(log) if log.exists() else ""


def _read(log: Path, start: int = 0) -> str:
    with open(log, "rb") as handle:
        handle.seek(start)
        head = handle.read(READ_BYTES)
        handle.seek(max(handle.tell(), log.stat().st_size - READ_BYTES))
        return (head + handle.read(READ_BYTES)).decode("utf-8", "replace")


def rename_into_place(staging: Path, target: Path) -> None:
    """Move whole or not at all, also from another file system. Raises OSError."""
    try:
        try:
            os.rename(staging, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            near = target.with_name(f".{staging.name}.moved")
            shutil.move(staging, near)
            os.rename(near, target)
    except OSError:
        if not target.exists():
            raise
        remove_tree(staging)  # another builder was faster: same content


def interesting(log: str, work: Path) -> str:
    """The telling lines of a compiler log, without scratch paths, at most 8 KB."""
    lines = log.replace(f"{work}/", "").splitlines()
    errors = [number for number, line in enumerate(lines) if ERROR_LINE.search(line)]
    picked = [line for number in errors[:20] for line in lines[number : number + 4]]
    return "\n".join(dict.fromkeys(picked if errors else lines[-40:]))[:LOG_BYTES]


# -- a full disk ---------------------------------------------------------------------------------


@contextmanager
def blaming_the_disk(folder: Path) -> Iterator[None]:
    """Turn an OSError for want of disk into a DiskFullError."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise full(folder, str(error)) from error


def raise_if_full(folder: Path, log: str) -> None:
    """Raise DiskFullError where a compiler in `folder` may have failed for want of disk.

    An empty or telling log is not enough: little must be free, or a quota used up.
    """
    free_bytes = shutil.disk_usage(folder).free
    suspect = SAYS_FULL.search(log) or not log.strip()
    if free_bytes < (FILE_LIMIT_BYTES if suspect else ROOM_BYTES) or (
        suspect and not _may_write(folder)
    ):
        raise full(folder, f"a compiler failed, and {free_bytes / 1e6:.0f} MB are free")


def full(folder: Path, cause: str) -> DiskFullError:
    return DiskFullError(
        f"the disk of {folder} is full: {cause}",
        "free disk space, or set CONCUR_CACHE to a folder on another disk",
    )


def _may_write(folder: Path) -> bool:
    """Try to write: only an attempt shows quotas."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            os.posix_fallocate(probe.fileno(), 0, ROOM_BYTES)
    except OSError as error:
        return error.errno not in FULL
    return True
