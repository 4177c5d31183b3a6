"""Removing what was decided on, in two steps: renamed into the root's trash, then deleted there.

Guarantees: a snapshot is where it was, whole, or gone from its place, whenever the process is
killed; what a killed sweep left in the trash goes with the next one; no link is followed, and
nothing outside of the root is touched; a run that holds the root (`in_use`) and a sweep (`alone`)
exclude each other, and the kernel lets go of the lock of who dies. Does not guarantee the same
against programs that read snapshots without `in_use`, or on file systems without locks: there the
ages of `plan.Keep` are the protection.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flows.ops.gc_inventory import TRASH
from kernels_eval.errors import UsageError

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)


@contextmanager
def in_use(root: str) -> Iterator[None]:
    """Hold a root while a run works on its snapshots; any number of runs may. Waits while a sweep
    decides (seconds). Nothing for a URL."""
    if "://" in root:
        yield
        return
    try:
        Path(root).mkdir(parents=True, exist_ok=True)
        handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # the first stage that writes there says it better
        yield
        return
    try:
        with suppress(OSError):  # no locks there: a run is not given up for that
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Hold a root against runs and other sweeps. Raises UsageError where one is at work."""
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"a run works on {root} now, or another gc does",
                "wait until it has ended; without --delete it is shown",
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            raise UsageError(
                f"the file system of {root} has no locks, so nobody knows whether a run works"
                " there",
                "run gc where the disk is attached",
            ) from error
        yield
    finally:
        os.close(handle)


def discard(root: Path, paths: Iterable[Path]) -> None:
    """Move these into the trash, in this order. Each goes by one rename. Raises UsageError for what
    lies outside of the root."""
    trash = root / TRASH
    if trash.is_symlink():
        raise UsageError(
            f"{trash} is a link", "remove it: what goes is never moved out of its root"
        )
    trash.mkdir(exist_ok=True)
    for path in paths:
        if root.resolve() not in path.resolve().parents or path.is_symlink():
            raise UsageError(
                f"{path} is not inside {root}",
                "this is a fault of ours or somebody changes the root; nothing more was removed",
            )
        try:
            os.rename(path, trash / f"{path.parent.name}-{path.name}-{uuid.uuid4().hex[:8]}")
        except OSError as error:
            raise UsageError(
                f"cannot move {path} into {trash}: {error.strerror}",
                "mend its permissions; the trash must lie on the same file system",
            ) from error


def empty_trash(root: Path) -> int:
    """Delete what lies in the trash, whoever put it there. Returns what could not be deleted; the
    next sweep tries that again."""
    trash = root / TRASH
    if trash.is_symlink() or not trash.is_dir():
        return 0
    for entry in list(os.scandir(trash)):
        with suppress(OSError):
            (
                shutil.rmtree(entry.path)
                if entry.is_dir(follow_symlinks=False)
                else os.unlink(entry.path)
            )
    left = len(os.listdir(trash))
    if not left:
        with suppress(OSError):
            trash.rmdir()
    return left
