"""Finished builds on a disk that workers share: folders written once.

Guarantees: a folder appears and goes as a whole and never changes; above the limit the least
recently used go, but no path within 30 minutes of its use; a full disk is `DiskFullError`.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from kernels_eval.compile.process import blaming_the_disk
from kernels_eval.errors import UsageError
from kernels_eval.sandbox.trees import remove_tree
from kernels_eval.source.spec import Build

LIMIT_BYTES = 20 << 30
LEAST_LIMIT_BYTES = 64 << 20  # below this a number was meant in other units
# From the answer of a builder to the load in a candidate's process: minutes, with a queue between.
KEEP_S = 30 * 60
# Storing takes milliseconds: what is older was left by a process that was killed.
STALE_S = 60 * 60
LOW_WATER = 0.8  # the share of the limit that eviction leaves
BLOCK_BYTES = 4096

RECORD = "build.json"
TAKEN = (errno.ENOTEMPTY, errno.EEXIST)
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


class Usage(NamedTuple):
    entries: int
    bytes: int


class Entry(NamedTuple):
    """A kept build: last use (Unix seconds), bytes on the disk, folder."""

    used_s: float
    bytes: int
    path: Path


def limit_from_environment() -> int:
    """`$CONCUR_CACHE_BYTES`, else 20 GiB; 0 is no limit. Raises UsageError. Not in verdicts'
    keys.
    """
    given = os.environ.get("CONCUR_CACHE_BYTES", str(LIMIT_BYTES))
    if not re.fullmatch(r"[0-9]+", given) or 0 < int(given) < LEAST_LIMIT_BYTES:
        raise UsageError(
            f"CONCUR_CACHE_BYTES={given} is not a limit for the build cache",
            f"give bytes, at least {LEAST_LIMIT_BYTES} (64 MiB), or 0 for no limit",
        )
    return int(given)


class BuildCache:
    """`<cache>/extensions/`: a folder `KEY[:2]/KEY/` per build. `limit_bytes`: 0 is no limit;
    default: the environment's.
    """

    def __init__(self, cache: Path, limit_bytes: int | None = None) -> None:
        self.cache, self.root = cache, cache / "extensions"
        self._given_limit_bytes = limit_bytes
        self._staging = self.root / ".staging"
        self._trimmed = False

    @cached_property
    def limit_bytes(self) -> int:
        given = self._given_limit_bytes
        return limit_from_environment() if given is None else given

    def find(self, key: str) -> Build | None:
        """The readable build under this key, marked as used, with an absolute `path`; or None."""
        entry = self._entry(key)
        try:
            _mark_used(entry)
            build = Build.model_validate_json((entry / RECORD).read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return _absolute(entry, build.model_copy(update={"cached": True}))

    def store(self, key: str, build: Build) -> Build:
        """Keep a build with a copy of its library; return the one kept first. Raises
        DiskFullError.
        """
        with blaming_the_disk(self.cache):
            self._staging.mkdir(parents=True, exist_ok=True)
            if not self._trimmed:
                self._trimmed = True
                self.trim()
            staging = self._new_name()
            try:
                kept = self._written(staging, build)
                return self._in_place(staging, self._entry(key), kept)
            finally:
                remove_tree(staging)

    def renew(self, libraries: Iterable[str]) -> None:
        for path in libraries:
            with suppress(OSError):
                _mark_used(Path(path).parent)

    def usage(self) -> Usage:
        """What the cache holds. Walks it: seconds where it is large."""
        sizes = [entry.bytes for entry in self._entries()]
        return Usage(len(sizes), sum(sizes))

    def trim(self) -> int:
        """Remove leftovers of killed processes and, above the limit, the least recently used;
        return their number.
        """
        for left in self._staging.iterdir():
            with suppress(OSError):
                if left.stat().st_mtime < time.time() - STALE_S:
                    remove_tree(left)
        if not self.limit_bytes:
            return 0
        entries = sorted(self._entries())
        held_bytes = sum(entry.bytes for entry in entries)
        if held_bytes <= self.limit_bytes:
            return 0
        removed, oldest_s = 0, time.time() - KEEP_S
        for entry in entries:
            if held_bytes <= LOW_WATER * self.limit_bytes or entry.used_s > oldest_s:
                break
            self._remove(entry.path)
            held_bytes -= entry.bytes
            removed += 1
        return removed

    def _entry(self, key: str) -> Path:
        return self.root / key[:2] / key

    def _new_name(self) -> Path:
        return self._staging / uuid.uuid4().hex

    def _written(self, staging: Path, build: Build) -> Build:
        staging.mkdir()
        if build.path:
            library = staging / Path(build.path).name
            shutil.copyfile(build.path, library)
            build = build.model_copy(update={"path": library.name})
        (staging / RECORD).write_text(build.model_dump_json())
        return build

    def _in_place(self, staging: Path, entry: Path, build: Build) -> Build:
        entry.parent.mkdir(exist_ok=True)
        while True:
            try:
                os.rename(staging, entry)
                return _absolute(entry, build)
            except OSError as error:
                if error.errno not in TAKEN:
                    raise
            if first := self.find(entry.name):
                return first.model_copy(update={"cached": False, "seconds": build.seconds})
            self._remove(entry)  # of another version of this code

    def _remove(self, entry: Path) -> None:
        away = self._new_name()
        with suppress(FileNotFoundError):  # another process was faster
            os.rename(entry, away)
        remove_tree(away)

    def _entries(self) -> Iterator[Entry]:
        for path in self.root.glob("??/*"):
            with suppress(OSError):  # gone while we look
                yield Entry(path.stat().st_mtime, _bytes_of(path), path)


def _absolute(entry: Path, build: Build) -> Build:
    return build.model_copy(update={"path": str(entry / build.path)}) if build.path else build


def _mark_used(entry: Path) -> None:
    """Note a use by the modification time: access times are not kept everywhere."""
    try:
        os.utime(entry)
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise


def _bytes_of(entry: Path) -> int:
    return BLOCK_BYTES + sum(
        -(-file.stat().st_size // BLOCK_BYTES) * BLOCK_BYTES for file in entry.iterdir()
    )
