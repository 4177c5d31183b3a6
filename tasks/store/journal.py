"""Journals: rows on disk at once, until they fill a part of a snapshot. Local file systems only.

Guarantees: added rows survive the process; a journal becomes a part exactly once, even after kills
(its name gives the part's); a living writer's journal is never taken.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import psutil

from kernels_eval.records import Json, Row, stable_hash


class Journal:
    """Collects rows of the next part, on disk too where there is a `folder`. `write_part` gets a
    full part's rows and the end of its name ("" for any). Methods raise OSError."""

    def __init__(
        self,
        folder: Path | None,
        write_part: Callable[[list[Row], str], None],
        rows_per_part: int,
    ) -> None:
        self._folder, self._write_part, self._rows_per_part = folder, write_part, rows_per_part
        self._rows: list[Row] = []
        self._file: TextIO | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def add(self, *rows: Row) -> None:
        """Keep rows, all or none; they are on disk when the call returns."""
        self._rows += rows
        if self._folder is not None:
            self._file = self._file or _create(self._folder)
            self._file.write(json.dumps(rows if rows[1:] else rows[0], default=str) + "\n")
            self._file.flush()
        if len(self._rows) >= self._rows_per_part:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._write_part(self._rows, part_suffix(Path(self._file.name)) if self._file else "")
        self._rows = []
        if self._file:
            self._file.close()
            Path(self._file.name).unlink(missing_ok=True)
            self._file = None

    def close(self) -> None:
        """Write the rest as a part. On failure the file stays for recovery."""
        try:
            self._flush()
        finally:
            if self._file:
                with suppress(OSError):  # the disk may be too full for what is still buffered
                    self._file.close()


def _create(folder: Path) -> TextIO:
    """Open a locked journal; the kernel unlocks it when its writer dies."""
    while True:
        path = folder / f".journal-{time.time_ns():020d}-{os.getpid()}.jsonl"
        handle = path.open("a", encoding="utf-8", errors="surrogatepass")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if path.exists():
            return handle
        handle.close()  # another process recovered it before it was locked


def part_suffix(journal: Path) -> str:
    """The end of a journal's part name, so that it becomes a part only once."""
    return stable_hash(journal.name)[:8]


def abandoned(folder: Path) -> Iterator[Path]:
    """Journals whose writers have died, each locked while the caller has it. Process ids, which are
    reused, count only on file systems without locks."""
    for path in sorted(folder.glob(".journal-*.jsonl")):
        with path.open("a") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            except OSError:
                if another_runs(int(path.stem.rsplit("-", 1)[1])):
                    continue
            if path.exists():
                yield path


def read_journal(journal: Path) -> list[Json]:
    """The whole rows of a journal, without a line cut off by a kill."""
    rows = []
    for line in journal.read_text(encoding="utf-8", errors="surrogatepass").split("\n"):
        with suppress(ValueError):
            found = json.loads(line)
            rows += found if isinstance(found, list) else [found]
    return rows


def another_runs(pid: int) -> bool:
    """Whether another process with this id is alive."""
    return pid != os.getpid() and psutil.pid_exists(pid)
