"""Whether a run has room on the disk, before it starts and while it works.

Guarantees: a run that would, by the estimate, leave less than the reserve on a file system it
writes to does not start; a running one stops within a second of reports once a file system has less
than the reserve, with one error that has the numbers and the fix, and what it had is resumable,
because the reserve is room enough to put it in order. Checks cost one statvfs a file system and
second. Does not guarantee that the estimate is right: it comes from what earlier runs under the
same root wrote for a row, and where there are none from rounded constants. Roots elsewhere (fsspec
URLs) have no free space that could be asked for.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from flows.runtime.config import GuardedRun
from kernels_eval.compile.cache import limit_from_environment
from kernels_eval.errors import DiskFullError
from kernels_eval.grouping import grouped
from kernels_eval.records import Record
from kernels_eval.toolchain import default_cache
from tasks.store.lookup import snapshots
from tasks.store.snapshot import Snapshot, SnapshotRef

GIB = 1 << 30
CHECK_EVERY_S = 1.0
BYTES_PER_TOKEN = 4
KEPT_PER_TEXT_BYTE = 0.75
"""Of a candidate: the response, and its reasoning and answer once more, compressed to 3/8."""
USUAL_TOKENS = 8_192
ENOUGH_ROWS = 20
"""Of a snapshot, to tell what a row takes."""
ROW_BYTES = {
    "synthesis": 8_000,
    "verification": 1_500,
    "workloads": 2_000,
    "trace-flags": 200,
    "curation": 12_000,
}
"""Of a row on the disk, where no earlier snapshot tells it (bundled and recorded data: 0.5 to 10
kB)."""
LIBRARY_BYTES = 400_000
"""Of a build in the cache, where the cache is too small to tell: a shared library and its log."""
FIX = (
    "free some: `concur gc` shows what is unused; or set root (CONCUR_CACHE, TMPDIR) to"
    " another disk; or lower guard.reserve_gib"
)


class Place(NamedTuple):
    """A directory that a run writes to, and the bytes that it will write there."""

    what: str
    path: Path
    bytes: int


class Room(Record):
    """One file system: free bytes, what a run will write to it, and the directories it is asked
    for."""

    free: int
    needed: int
    places: tuple[str, ...]

    def line(self) -> str:
        return (
            f"{', '.join(self.places)}: {self.free / GIB:.1f} GiB free, about"
            f" {self.needed / GIB:.1f} GiB needed"
        )


def free_bytes(path: Path) -> int:
    """Free to this user on the file system that holds `path`, or its nearest directory that exists.
    Raises OSError."""
    found = os.statvfs(_existing(path))
    return found.f_bavail * found.f_frsize


def rooms(places: list[Place]) -> list[Room]:
    """The file systems behind some places, each once."""
    together = grouped((_existing(place.path).stat().st_dev, place) for place in places)
    return [
        Room(
            free=min(free_bytes(place.path) for place in each),
            needed=sum(place.bytes for place in each),
            places=tuple(f"{place.what} {place.path}" for place in each),
        )
        for each in together.values()
    ]


def require_room(run: GuardedRun, tasks: SnapshotRef | None = None) -> list[Room]:
    """The room for a run, with `tasks` (once they are known) for what they will bring. Raises
    DiskFullError where it is too little."""
    if not run.reserve_gib:
        return []
    found = rooms(list(places_of(run, tasks)))
    reserve = int(run.reserve_gib * GIB)
    for room in found:
        if room.free - room.needed < reserve:
            raise DiskFullError(
                f"there is too little disk space for this run: {room.line()}, and {_gib(reserve)}"
                " must stay free",
                FIX,
            )
    return found


def places_of(run: GuardedRun, tasks: SnapshotRef | None = None) -> Iterator[Place]:
    """Every directory that a run writes to, with an estimate in bytes of what it adds there: 0
    while the tasks are not known."""
    rows = _new_rows(run, tasks) if tasks is not None else {}
    if "://" not in run.root:
        tables = sum(int(count * row_bytes(run, stage)) for stage, count in rows.items())
        adapter = _training_bytes(run.root) if rows else 0
        yield Place("root", Path(run.root).absolute(), tables + adapter)
    builds = rows.get("verification", 0) * LIBRARY_BYTES
    yield Place("build cache", default_cache(), min(builds, limit_from_environment() or builds))
    yield Place("temporary files", Path(tempfile.gettempdir()), 0)


def row_bytes(run: GuardedRun, stage: str) -> float:
    """Bytes of a row of a stage on the disk: as in the largest earlier snapshot of this root, else
    by the settings."""
    rows, size = 0, 0
    for snapshot in _finished(run.root, stage):
        parts = Path(snapshot.path).glob("part-*.parquet")
        found = int(snapshot.manifest["rows"]), sum(path.stat().st_size for path in parts)
        rows, size = max((rows, size), found)
    if rows >= ENOUGH_ROWS:
        return size / rows
    if stage == "synthesis" and run.answer_tokens is not None:
        return min(run.answer_tokens, USUAL_TOKENS) * BYTES_PER_TOKEN * KEPT_PER_TEXT_BYTE
    return ROW_BYTES[stage]


def _finished(root: str, stage: str) -> Iterator[Snapshot]:
    return (each for each in snapshots(root, stage) if each.finished and each.is_local)


def _training_bytes(root: str) -> int:
    """Adapter and checkpoints, as the largest earlier training of this root left them; 0 where
    there was none."""
    sizes = [
        sum(file.stat().st_size for file in Path(each.path).rglob("*") if file.is_file())
        for each in _finished(root, "training")
    ]
    return max(sizes, default=0)


def _new_rows(run: GuardedRun, tasks: SnapshotRef) -> dict[str, int]:
    """Rows that each stage will add: answers that the newest synthesis of these tasks has are
    reused."""
    count = int(tasks.open().manifest["rows"])
    candidates = count * run.candidates_per_task
    known = [
        int(each.manifest["rows"])
        for each in _finished(tasks.root, "synthesis")
        if tasks.fingerprint in each.manifest["upstream"]
    ]
    new = max(0, candidates - max(known, default=0))
    # A changed verifier writes all verdicts again, which are small.
    return {
        "synthesis": new,
        "verification": candidates,
        "workloads": count,
        "trace-flags": candidates,
        "curation": new and count,
    }


class DiskWatch:
    """An observer (tasks.progress) that stops the run which reports to it, once a file system has
    less than the reserve."""

    def __init__(self, run: GuardedRun, clock: Callable[[], float] = time.monotonic) -> None:
        self._reserve = int(run.reserve_gib * GIB)
        self._clock, self._next = clock, 0.0
        self._places = list(places_of(run)) if self._reserve else []

    def __call__(self, stage: str, done: int, total: int, note: str) -> None:
        """Raises DiskFullError, from where the stage reports."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + CHECK_EVERY_S
        for place in self._places:
            free = free_bytes(place.path)
            if free < self._reserve:
                raise DiskFullError(
                    f"{place.what} {place.path} has {_gib(free)} left, and {_gib(self._reserve)}"
                    f" must stay free: {stage} stopped at {done} of {total}; finished rows are"
                    " kept; start the same run again to resume",
                    FIX,
                )


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / (1 << 20):.0f} MiB"
