"""The lock of a root: runs share it, garbage collection holds it alone.

Guarantees: the kernel releases the lock of a process that dies. Does not guarantee anything against
programs that read snapshots without `in_use`, or on file systems without locks: there the ages of
`flows.ops.gc_plan.Keep` are the protection. Importing this module loads nothing heavy.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kernels_eval.errors import UsageError

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)


@contextmanager
def in_use(root: str) -> Iterator[None]:
    """Hold a root while a run works on its snapshots; any number of runs may hold it.

    Waits while garbage collection decides (seconds). Does nothing for a URL.
    """
    if "://" in root:
        yield
        return
    try:
        Path(root).mkdir(parents=True, exist_ok=True)
        handle = _opened(root)
    except OSError:  # the first stage that writes there explains it better
        yield
        return
    try:
        with suppress(OSError):  # a file system without locks does not stop a run
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Hold a root against runs and other collections. Raises UsageError while one is at work."""
    handle = _opened(root)
    try:
        _lock_alone(handle, root)
        yield
    finally:
        os.close(handle)


def _lock_alone(handle: int, root: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(
            f"a run or another gc is using {root}",
            "wait until it has ended; without --delete gc only reports",
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise UsageError(
            f"the file system of {root} has no locks, so a run that works there cannot be seen",
            "run gc where the disk is attached",
        ) from error


def _opened(root: str | Path) -> int:
    return os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
