"""Finished builds on a disk that any number of workers share, kept below a limit: the least
recently used go first.

Guarantees: an entry appears whole or not at all, and goes as a whole (staging and rename; a name
that was renamed away belongs to whoever renamed it), also where a process is killed at any moment;
a library that a power cut shortened is not handed out; a path that was handed out stays for 30
minutes after its last use, even where the cache is above its limit; nothing waits for a lock of a
dead process (flock: the kernel releases it); a full disk is `DiskFullError`, never a candidate's
fault.

Needs of the filesystem: a rename that is atomic. Locks may be per machine (as on some NFS): they
only save two processes from evicting at once. Ages are told by the filesystem's own clock.

Does not guarantee that something is built once only (two may build it at the same time: the first
to finish is kept), nor the limit to the byte: a store counts the cache at random, on average once
for every 2 % of the limit that is stored. Headers and shims (`prepared`) are not part of it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

from kernels_eval.compile.process import blaming_the_disk, locked
from kernels_eval.errors import DiskFullError, UsageError
from kernels_eval.source.spec import Build

LIMIT_BYTES = 20 << 30
LEAST_LIMIT_BYTES = 64 << 20  # below this a number was meant in other units
# From the answer of a builder to the load in a candidate's process: minutes, with a queue between.
KEEP_S = 30 * 60
# Storing takes milliseconds: what is older was left by a process that was killed.
STALE_S = 60 * 60
LOW_WATER = 0.8  # the share of the limit that eviction leaves
COUNT_SHARE = 0.02  # the share of the limit that is stored between two counts, on average
BLOCK_BYTES = 4096

RECORD = "build.json"
GONE = (errno.ENOENT, errno.ESTALE)
TAKEN = (errno.ENOTEMPTY, errno.EEXIST)

T = TypeVar("T")


class Usage(NamedTuple):
    entries: int
    bytes: int


def limit_from_environment() -> int:
    """`$CONCUR_CACHE_BYTES`, else 20 GiB; 0 is no limit. Raises UsageError for anything else.

    Not a field of BuildConfig: that is part of every verdict's key, and disk space changes no
    verdict.
    """
    given = os.environ.get("CONCUR_CACHE_BYTES", str(LIMIT_BYTES))
    if not re.fullmatch(r"[0-9]+", given) or 0 < int(given) < LEAST_LIMIT_BYTES:
        raise UsageError(
            f"CONCUR_CACHE_BYTES={given} is not a limit for the build cache",
            f"give bytes, at least {LEAST_LIMIT_BYTES} (64 MiB), or 0 for no limit",
        )
    return int(given)


class BuildCache:
    """`<cache>/extensions/`: one folder a build, `KEY[:2]/KEY/`, which holds `build.json` and,
    where it succeeded, the library.

    `limit_bytes`: 0 is no limit; by default that of the environment, read when it is first needed.
    """

    def __init__(self, cache: Path, limit_bytes: int | None = None) -> None:
        self.cache, self.root = cache, cache / "extensions"
        self._given_limit_bytes = limit_bytes
        self._staging = self.root / ".staging"
        self._lock = self.root / ".lock"
        self._swept = False

    @cached_property
    def limit_bytes(self) -> int:
        given = self._given_limit_bytes
        return limit_from_environment() if given is None else given

    # -- entries -----------------------------------------------------------------------------------

    def find(self, key: str) -> Build | None:
        """The build kept under this key, from now on the last one used; None where there is none.
        Its `path` is absolute."""
        entry = self._entry(key)
        try:
            _mark_used(entry)
            build = Build.model_validate_json((entry / RECORD).read_bytes())
            if build.path and build.library_bytes not in (0, (entry / build.path).stat().st_size):
                raise ValueError("not the library that was stored")
        except ValueError:  # written by another version of this code, or cut off with the power
            with suppress(OSError):
                self._discard(entry)
        except OSError as error:
            if error.errno not in GONE:
                raise
        else:
            return _absolute(entry, build.model_copy(update={"cached": True}))
        return None

    def store(self, key: str, build: Build) -> Build:
        """Keep a build, with a copy of the library at its `path`. Returns it as it is kept, which
        is another's where that came first.

        Above the limit, the least recently used entries go. Raises DiskFullError where no room can
        be made.
        """
        return self.with_room(lambda: self._store(self._entry(key), build))

    def renew(self, libraries: Iterable[str]) -> None:
        """Count these paths as used now. One that is gone is ignored: its user builds it again."""
        for path in libraries:
            with suppress(OSError):
                _mark_used(Path(path).parent)

    def usage(self) -> Usage:
        """What the cache holds. Walks it: seconds where it is large."""
        sizes = [size for _, size, _ in self._entries()]
        return Usage(len(sizes), sum(sizes))

    def _entry(self, key: str) -> Path:
        return self.root / key[:2] / key

    def _store(self, entry: Path, build: Build) -> Build:
        self._prepare()
        staging = self._away()
        staging.mkdir()
        try:
            kept = build
            if build.path:
                library = staging / Path(build.path).name
                shutil.copyfile(build.path, library)
                size = library.stat().st_size
                kept = build.model_copy(update={"path": library.name, "library_bytes": size})
            (staging / RECORD).write_text(kept.model_dump_json())
            size = _bytes_of(staging)
            entry.parent.mkdir(exist_ok=True)
            if found := self._rename_into_place(staging, entry):
                return found.model_copy(update={"cached": False, "seconds": build.seconds})
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        if self._count_is_due(size):
            self.trim()
        return _absolute(entry, kept)

    def _rename_into_place(self, staging: Path, entry: Path) -> Build | None:
        """None, or the entry that another builder has put there meanwhile."""
        while True:
            try:
                os.rename(staging, entry)
                return None
            except OSError as error:
                if error.errno not in TAKEN:
                    raise
            if found := self.find(entry.name):
                return found
            self._discard(entry)

    def _discard(self, entry: str | Path) -> None:
        """Remove as a whole: renamed first, so that an owner who lives after all fails as a
        whole."""
        self._prepare()
        away = self._away()
        with suppress(FileNotFoundError):
            os.rename(entry, away)
        shutil.rmtree(away, ignore_errors=True)

    def _away(self) -> Path:
        return self._staging / uuid.uuid4().hex

    def _prepare(self) -> None:
        self._staging.mkdir(parents=True, exist_ok=True)
        if not self._swept:
            self._swept = True
            with self._alone() as alone:
                if alone:
                    self._sweep()

    # -- eviction ----------------------------------------------------------------------------------

    def make_room(self) -> bool:
        """Evict half of the bytes, because the disk is full. False where nothing may go."""
        if not self._staging.is_dir():
            return False
        with self._alone() as alone:
            if alone:
                return self._evict(to_half=True) > 0
        with locked(self._lock):
            return True  # another process was evicting: what it freed is there for all

    def trim(self) -> int:
        """Evict down to the limit now. Returns how many entries went, 0 where another process
        evicts."""
        self._prepare()
        with self._alone() as alone:
            return self._evict() if alone else 0

    def _evict(self, *, to_half: bool = False) -> int:
        """Remove what was used longest ago, where the cache is above its limit. Returns how many
        entries went."""
        self._sweep()
        before_ns = self._now_ns() - KEEP_S * 10**9
        entries = sorted(self._entries())
        held, removed = sum(size for _, size, _ in entries), 0
        above = 0 < self.limit_bytes < held
        goal = held // 2 if to_half else int(LOW_WATER * self.limit_bytes) if above else held
        for used_ns, size, path in entries:
            if held <= goal or used_ns > before_ns:
                break
            if self._remove(path, before_ns):
                held -= size
                removed += 1
        return removed

    def _count_is_due(self, size: int) -> bool:
        """Whether a store of `size` bytes should look for the limit. At random: no state is shared
        by the processes that store."""
        limit = self.limit_bytes
        return limit > 0 and random.random() * COUNT_SHARE * limit < size

    def _remove(self, entry: str, before_ns: int) -> bool:
        """Remove an entry that nobody has used since. A use just before the rename shows after it:
        then it is put back."""
        away = self._away()
        try:
            if os.stat(entry).st_mtime_ns > before_ns:
                return False
            os.rename(entry, away)
            if os.stat(away).st_mtime_ns > before_ns:
                os.rename(away, entry)
                return False
        except OSError:
            return False
        shutil.rmtree(away, ignore_errors=True)
        return True

    def _sweep(self) -> None:
        """Remove what killed processes have left."""
        before_ns = self._now_ns() - STALE_S * 10**9
        for left in os.scandir(self._staging):
            with suppress(OSError):
                if left.stat(follow_symlinks=False).st_mtime_ns < before_ns:
                    self._discard(left.path)

    def _entries(self) -> Iterator[tuple[int, int, str]]:
        """When each was last used (nanoseconds), its size in bytes, and its path."""
        with suppress(FileNotFoundError):
            for group in os.scandir(self.root):
                if len(group.name) != 2:
                    continue
                for entry in os.scandir(group.path):
                    with suppress(OSError):  # gone while we look
                        used_ns = entry.stat(follow_symlinks=False).st_mtime_ns
                        yield used_ns, _bytes_of(entry.path), entry.path

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Yield whether no other process of this machine is evicting. Where the filesystem has no
        locks: True."""
        with open(self._lock, "w") as handle:
            alone = True
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                alone = False
            except OSError:
                pass
            yield alone

    def _now_ns(self) -> int:
        os.utime(self._lock)
        return self._lock.stat().st_mtime_ns

    # -- a full disk -------------------------------------------------------------------------------

    def with_room(self, work: Callable[[], T]) -> T:
        """What `work` returns; where the disk is full, after an eviction down to half. Raises
        DiskFullError where that does not help."""
        try:
            with blaming_the_disk(self.cache):
                return work()
        except DiskFullError:
            if not self.make_room():
                raise
        with blaming_the_disk(self.cache):
            return work()


def _absolute(entry: Path, build: Build) -> Build:
    return build.model_copy(update={"path": str(entry / build.path)}) if build.path else build


def _mark_used(entry: Path) -> None:
    """Note a use by the time of last change: that of last access is not kept everywhere."""
    try:
        os.utime(entry)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):  # a read-only cache
            raise


def _bytes_of(entry: str | Path) -> int:
    """What a folder of files takes on a disk: whole blocks, and one for the folder."""
    return BLOCK_BYTES + sum(
        -(-file.stat().st_size // BLOCK_BYTES) * BLOCK_BYTES for file in os.scandir(entry)
    )
