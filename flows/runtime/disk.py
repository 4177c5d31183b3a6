"""Room on the disk, before and during a run: one stops within a second of reports once a file
system it writes to has less than `RESERVE_GIB`. URLs are not checked."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kernels_eval.errors import DiskFullError
from kernels_eval.toolchain import default_cache

GIB = 1 << 30
RESERVE_GIB = 2.0
CHECK_EVERY_S = 1.0
FIX = (
    "free some: `concur gc` shows what is unused; or set root (CONCUR_CACHE, TMPDIR) to"
    " another disk"
)


def require_room(root: str, doing: str = "this run does not start") -> None:
    """Raise DiskFullError where a file system that a run writes to is below the reserve."""
    places = {"build cache": default_cache(), "temporary files": Path(tempfile.gettempdir())}
    if "://" not in root:
        places["root"] = Path(root).absolute()
    for name, path in places.items():
        free_gib = free_bytes(path) / GIB
        if free_gib < RESERVE_GIB:
            raise DiskFullError(
                f"{name} {path} has {free_gib:.1f} GiB left, and {RESERVE_GIB:g} GiB must stay"
                f" free: {doing}",
                FIX,
            )


def free_bytes(path: Path) -> int:
    """Free bytes for this user on the file system of `path` or its nearest existing parent. Raises
    OSError."""
    existing = next(each for each in (path, *path.parents) if each.exists())
    found = os.statvfs(existing)
    return found.f_bavail * found.f_frsize


class DiskWatch:
    """An observer (tasks.progress) that stops the reporting run once a file system is below the
    reserve."""

    def __init__(self, root: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self._clock, self._next = root, clock, 0.0

    def __call__(self, stage: str, done: int, total: int, note: str) -> None:
        """Raise DiskFullError in the reporting stage."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + CHECK_EVERY_S
        kept = "finished rows are kept; start the same run again to resume"
        require_room(self._root, f"{stage} stopped at {done} of {total}; {kept}")
