"""Rows of a snapshot in another order than they were written in: in bounded memory, and in time
linear in the rows.

Guarantees: every part is read once, when the first of its rows is due. Rows that are due later wait
in memory up to `BUFFER_BYTES`; beyond that they wait in files of a directory that the caller gives
and removes, each row written and read once. Does not bound what one stretch (2,048 rows) weighs,
and does not notice parts that are added meanwhile.

Why no sorted copy: it would write every candidate's code again before the first is verified, though
synthesis writes nearly in order, so that here usually nothing is written at all; and polars sorts
in memory.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.store.snapshot import Snapshot

if TYPE_CHECKING:
    import polars as pl

STRETCH_ROWS = 2048
BUFFER_BYTES = 128 * 2**20
ROW_BYTES = 1000
"""What a row takes in memory besides its text, about."""


def rows_in_order(
    snapshot: Snapshot,
    places: pl.DataFrame,
    columns: Sequence[str],
    scratch: Path,
    *,
    buffer_bytes: int = BUFFER_BYTES,
) -> Generator[dict[str, Any], None, None]:
    """The rows at `places` (columns `part` and `row`, see Snapshot.index) in just that order, with
    these columns."""
    numbered = places.select("part", "row").with_row_index("position")
    unread = deque(
        numbered.partition_by("part", maintain_order=True)
    )  # in the order in which their first rows are due
    waiting = _Waiting(scratch, buffer_bytes)
    for stretch in range(-(-len(numbered) // STRETCH_ROWS)):
        while unread and unread[0]["position"][0] < (stretch + 1) * STRETCH_ROWS:
            part = unread.popleft().sort("row")
            positions = iter(part["position"].to_list())
            for batch in snapshot.rows_at(part["part"][0], part["row"].to_numpy(), columns):
                for row in batch:
                    waiting.add(next(positions), row)
                waiting.spill(keep=stretch)
        yield from waiting.take(stretch)


class _Waiting:
    """Rows that have been read before their turn, by the stretch of positions they belong to."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self._directory, self._limit_bytes = directory, limit_bytes
        self._rows: dict[int, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
        self._bytes: dict[int, int] = defaultdict(int)
        self._total_bytes = 0

    def add(self, position: int, row: dict[str, Any]) -> None:
        weight = ROW_BYTES + sum(len(value) for value in row.values() if isinstance(value, str))
        self._rows[position // STRETCH_ROWS].append((position, row))
        self._bytes[position // STRETCH_ROWS] += weight
        self._total_bytes += weight

    def take(self, stretch: int) -> Iterator[dict[str, Any]]:
        """All rows of a stretch, in order."""
        rows = self._forget(stretch)
        path = self._path(stretch)
        if path.exists():
            with open(path, encoding="utf-8") as lines:
                rows += [tuple(json.loads(line)) for line in lines]
            path.unlink()
        for _, row in sorted(rows, key=lambda pair: pair[0]):
            yield row

    def spill(self, keep: int) -> None:
        """Where too much waits, write down all but the stretch that is due."""
        if self._total_bytes - self._bytes[keep] <= self._limit_bytes:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        for stretch in [stretch for stretch in self._rows if stretch != keep]:
            with open(self._path(stretch), "a", encoding="utf-8") as handle:
                handle.writelines(json.dumps(pair) + "\n" for pair in self._forget(stretch))

    def _forget(self, stretch: int) -> list[tuple[int, dict[str, Any]]]:
        self._total_bytes -= self._bytes.pop(stretch, 0)
        return self._rows.pop(stretch, [])

    def _path(self, stretch: int) -> Path:
        return self._directory / f"{stretch:08d}.jsonl"
