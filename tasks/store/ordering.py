"""Rows of a snapshot in another order than they were written in, in bounded memory and in time
linear in the rows.

Guarantees: every part is read once, when the first of its rows is due. Rows that are due later wait
in memory up to `BUFFER_BYTES`, beyond that in files of a directory that the caller gives and
removes, each row written and read once. Does not bound what one stretch (2,048 rows) weighs, and
does not notice parts that are added meanwhile.

Why no sorted copy: it would write every candidate's code again before the first is verified, though
synthesis writes nearly in order, so that usually nothing is written here; and polars sorts in
memory.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kernels_eval.records import Json
from tasks.store.snapshot import Snapshot

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

STRETCH_ROWS = 2048
BUFFER_BYTES = 128 * 2**20
TABLE_BYTES, COLUMN_BYTES = 4096, 512
"""What a small table and each of its columns take in memory besides their content, about."""
POSITION = "__position"


def rows_in_order(
    snapshot: Snapshot,
    places: pl.DataFrame,
    columns: Sequence[str],
    scratch: Path,
    *,
    buffer_bytes: int = BUFFER_BYTES,
) -> Generator[Json, None, None]:
    """The rows at `places` (columns `part` and `row`, see Snapshot.index) in just that order, with
    these columns."""
    import pyarrow as pa

    every = snapshot.schema()
    schema = pa.schema([every.field(name) for name in columns if name in every.names])
    for table in tables_in_order(snapshot, places, schema, scratch, buffer_bytes=buffer_bytes):
        yield from table.to_pylist()


def tables_in_order(
    snapshot: Snapshot,
    places: pl.DataFrame,
    schema: pa.Schema,
    scratch: Path,
    *,
    buffer_bytes: int = BUFFER_BYTES,
) -> Generator[pa.Table, None, None]:
    """The rows at `places` in just that order, as tables of `schema`, a stretch at a time.

    Columns that a part lacks are null in its rows.
    """
    import pyarrow as pa

    numbered = places.select("part", "row").with_row_index("position")
    # parts in the order in which their first rows are due
    unread = deque(numbered.partition_by("part", maintain_order=True))
    waiting = _Waiting(scratch, buffer_bytes)
    for stretch in range(-(-len(numbered) // STRETCH_ROWS)):
        while unread and unread[0]["position"][0] < (stretch + 1) * STRETCH_ROWS:
            part = unread.popleft().sort("row")
            start, positions = 0, part["position"].to_numpy().astype("int64")
            for batch in snapshot.batches_at(part["part"][0], part["row"].to_numpy(), schema.names):
                columns = [_column(batch, field) for field in schema]
                position = pa.array(positions[start : start + len(batch)])
                names = [*schema.names, POSITION]
                waiting.add(pa.table([*columns, position], names=names))
                start += len(batch)
                waiting.spill(keep=stretch)
        yield waiting.take(stretch).cast(schema)


def _column(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    import pyarrow as pa

    if field.name not in batch.schema.names:
        return pa.nulls(len(batch), field.type)
    return batch.column(field.name).cast(field.type)


class _Waiting:
    """Rows that were read before their turn, by the stretch of positions they belong to."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self._directory, self._limit_bytes = directory, limit_bytes
        self._tables: dict[int, list[pa.Table]] = defaultdict(list)
        self._bytes: dict[int, int] = defaultdict(int)
        self._files: dict[int, list[Path]] = defaultdict(list)

    def add(self, table: pa.Table) -> None:
        import numpy as np

        stretches = table[POSITION].to_numpy() // STRETCH_ROWS
        for stretch in np.unique(stretches).tolist():
            found = table.take(np.flatnonzero(stretches == stretch))
            self._tables[stretch].append(found)
            self._bytes[stretch] += TABLE_BYTES + COLUMN_BYTES * found.num_columns + found.nbytes

    def take(self, stretch: int) -> pa.Table:
        """All rows of a stretch, in order."""
        import pyarrow as pa

        tables = self._forget(stretch)
        for path in self._files.pop(stretch, []):
            with pa.OSFile(str(path), "rb") as source:
                tables.append(pa.ipc.open_stream(source).read_all())
            path.unlink()
        return pa.concat_tables(tables).sort_by(POSITION).drop_columns([POSITION]).combine_chunks()

    def spill(self, keep: int) -> None:
        """Write down all but the stretch that is due, where too much waits."""
        import pyarrow as pa

        if sum(self._bytes.values()) - self._bytes[keep] <= self._limit_bytes:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        for stretch in [stretch for stretch in self._tables if stretch != keep]:
            table = pa.concat_tables(self._forget(stretch))
            path = self._directory / f"{stretch:08d}-{len(self._files[stretch])}.arrow"
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            with (
                pa.OSFile(str(path), "wb") as sink,
                pa.ipc.new_stream(sink, table.schema, options=options) as writer,
            ):
                writer.write_table(table)
            self._files[stretch].append(path)

    def _forget(self, stretch: int) -> list[pa.Table]:
        self._bytes.pop(stretch, None)
        return self._tables.pop(stretch, [])
