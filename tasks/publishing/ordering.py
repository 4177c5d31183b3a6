"""Rows of a snapshot as Arrow tables in another order than they were written in, in bounded memory.

Guarantees: every part is read once; memory holds one batch of a part and one bucket (1,024 rows;
above 262,144 rows 1/256 of them). The rows wait in files of a directory that the caller gives and
removes, so the texts are on that disk twice for a while.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.publishing.lineage import open_part
from tasks.store.snapshot import Snapshot

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

BUCKET_ROWS = 1024
MOST_BUCKETS = 256  # each is an open file
BATCH_ROWS = 256
POSITION = "__position"


def schema_of(snapshot: Snapshot) -> pa.Schema:
    """Every column that some part has, in the order of the first part, without metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schemas = []
    for part in snapshot.parts():
        with open_part(snapshot, part) as handle:
            schemas.append(pq.read_schema(handle).remove_metadata())
    return pa.unify_schemas(schemas, promote_options="permissive") if schemas else pa.schema([])


def tables_in_order(
    snapshot: Snapshot, places: pl.DataFrame, schema: pa.Schema, scratch: Path
) -> Iterator[pa.Table]:
    """The rows at `places` (columns `part` and `row`, see Snapshot.index) in just that order, as
    tables of `schema`, a bucket at a time.

    Columns that a part lacks are null in its rows.
    """
    import polars as pl
    import pyarrow as pa

    bucket_rows = max(BUCKET_ROWS, -(-len(places) // MOST_BUCKETS))
    numbered = (
        places.select("part", "row")
        .with_row_index("position")
        .with_columns(pl.col("position").cast(pl.Int64))
    )
    stored = schema.append(pa.field(POSITION, pa.int64()))
    scratch.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        writers: dict[int, Any] = {}
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        for (part,), rows in numbered.sort("part", "row").group_by("part", maintain_order=True):
            for batch in _batches_of(snapshot, str(part), rows, schema):
                buckets = batch[POSITION].to_numpy() // bucket_rows
                for bucket in sorted(set(buckets.tolist())):
                    if bucket not in writers:
                        sink = stack.enter_context(
                            pa.OSFile(str(scratch / f"{bucket}.arrow"), "wb")
                        )
                        writers[bucket] = stack.enter_context(
                            pa.ipc.new_stream(sink, stored, options=options)
                        )
                    writers[bucket].write_table(batch.filter(pa.array(buckets == bucket)))
    for bucket in sorted(writers):
        path = scratch / f"{bucket}.arrow"
        with pa.OSFile(str(path), "rb") as source, pa.ipc.open_stream(source) as reader:
            table = reader.read_all()
        path.unlink()
        yield table.sort_by(POSITION).drop_columns([POSITION]).combine_chunks()


def _batches_of(
    snapshot: Snapshot, part: str, rows: pl.DataFrame, schema: pa.Schema
) -> Iterator[pa.Table]:
    """The rows of one part that are wanted, each with its position in the new order."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted, positions, start = (
        rows["row"].to_numpy().astype("int64"),
        rows["position"].to_numpy(),
        0,
    )
    with open_part(snapshot, part) as handle:
        file = pq.ParquetFile(handle)
        there = [name for name in schema.names if name in file.schema_arrow.names]
        for batch in file.iter_batches(BATCH_ROWS, columns=there):
            first, last = np.searchsorted(wanted, (start, start + len(batch)))
            if last > first:
                taken = pa.Table.from_batches([batch.take(pa.array(wanted[first:last] - start))])
                columns = [
                    (
                        taken[field.name].cast(field.type)
                        if field.name in there
                        else pa.nulls(len(taken), field.type)
                    )
                    for field in schema
                ]
                yield pa.table(
                    [*columns, pa.array(positions[first:last])],
                    schema=schema.append(pa.field(POSITION, pa.int64())),
                )
            start += len(batch)
