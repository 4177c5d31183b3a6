"""The workspace lock: runs share it, garbage collection holds it alone. A dead process's is
released. Does nothing for a URL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import ReadWriteLock, Timeout

from kernels_eval.errors import UsageError

FILE = ".workspace-lock"


@contextmanager
def in_use(root: str) -> Iterator[None]:
    """Hold a workspace while a run works on its snapshots, shared with other runs. Waits for
    garbage collection."""
    if "://" in root:
        yield
        return
    Path(root).mkdir(parents=True, exist_ok=True)
    with _lock(root).read_lock():
        yield


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Hold a workspace alone. Raises UsageError while a run or collection works."""
    try:
        with _lock(root).write_lock(blocking=False):
            yield
    except Timeout as error:
        raise UsageError(
            f"a run or another gc is using {root}",
            "wait until it has ended; without --delete gc only reports",
        ) from error


def _lock(root: str | Path) -> ReadWriteLock:
    return ReadWriteLock(Path(root) / FILE, is_singleton=False)
