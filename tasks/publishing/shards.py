"""A curated snapshot as Parquet shards, each row with where it comes from.

Guarantees: the same rows give the same bytes under the same pyarrow, however they were divided into
parts; rows ascend by task_id, sample_index, candidate_id; a shard is closed by the first row group
that brings it to the limit (a row group holds at most 1,000 rows and, unless a single row weighs
more, 32 MiB of uncompressed data); a task's split follows from the seed and its id alone, so no
refresh moves it. Memory holds the ids and provenance of all rows (about 0.5 kB a row), and one
stretch of rows, and two row groups of texts.

Does not guarantee that both splits have no program in common: two task_ids may name the same
program.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from polars import selectors

from kernels_eval.errors import UsageError
from kernels_eval.records import Record
from tasks.publishing.columns import (
    ORIGINS,
    REQUIRED,
    licence_of,
    provenance,
    published_schema,
)
from tasks.publishing.config import PublishOptions
from tasks.publishing.lineage import (
    ABOVE,
    Lineage,
    readable,
    require,
    select,
    source_of,
)
from tasks.sources.holdout import place_of
from tasks.store import Snapshot, tables_in_order

TRAIN, TEST = "train", "test"
GROUP_ROWS = 1000
GROUP_BYTES = 32 * 2**20
# Content-defined pages: rows that a refresh adds leave most other pages as they were, so a hub that
# keeps known content is sent little.
PARQUET_SETTINGS = {
    "compression": "zstd",
    "compression_level": 6,
    "write_page_index": True,
    "use_content_defined_chunking": True,
}


class Shard(Record):
    """One Parquet file of the set: its path inside the folder, rows, distinct tasks and size in
    bytes."""

    config: str
    split: str
    path: str
    rows: int
    tasks: int
    size_bytes: int


def split_of(task_id: str, seed: int, holdout_share: float) -> str:
    """`test` for about `holdout_share` (0 to 1) of all task ids, `train` for the others."""
    return TEST if place_of(task_id, seed) < holdout_share else TRAIN


def write_shards(
    line: Lineage,
    folder: Path,
    options: PublishOptions,
    *,
    config: str,
    directory: str,
    scratch: Path,
) -> list[Shard]:
    """Write `directory/{split}-{number}-of-{count}.parquet` under `folder`; returns them, `train`
    first.

    `scratch` is a directory that is not needed afterwards, with room for the rows once. Raises
    UsageError where the snapshot lacks columns or rows, where what it was made from is missing,
    and where the hold-out leaves nothing to train on.
    """
    schema, rows = _checked(line), _rows(line)
    (folder / directory).mkdir(parents=True, exist_ok=True)
    found = []
    names = rows["task_id"].unique(maintain_order=True).to_list()
    for split in (TRAIN, TEST):
        here = [
            name for name in names if split_of(name, options.seed, options.holdout_share) == split
        ]
        if split == TRAIN and not here:
            raise UsageError(
                f"the hold-out takes all {len(names)} tasks", "hold out a smaller share"
            )
        chosen = rows.filter(pl.col("task_id").is_in(here))
        groups = _row_groups(_tables(line.curated, chosen, schema, scratch / split))
        written = list(_written(groups, schema, folder / directory, options.shard_bytes))
        for number, (temporary, count, tasks) in enumerate(written):
            path = f"{directory}/{split}-{number:05d}-of-{len(written):05d}.parquet"
            size_bytes = temporary.rename(folder / path).stat().st_size
            found.append(
                Shard(
                    config=config,
                    split=split,
                    path=path,
                    rows=count,
                    tasks=tasks,
                    size_bytes=size_bytes,
                )
            )
    return found


# -- what is published -----------------------------------------------------------------------------


def _checked(line: Lineage) -> pa.Schema:
    """The schema to publish."""
    where = line.curated.path
    with readable(f"the columns of {where}"):
        curated = line.curated.schema()
    if not curated.names:
        raise _empty(where)
    require(pl.DataFrame(curated.empty_table()), f"the curated set {where}", REQUIRED)
    for name in ORIGINS:
        if getattr(line, name) is None:
            raise UsageError(
                f"the {ABOVE[name][-1]} snapshot that {where} was made from is missing",
                "rows are published with where they come from: copy the whole root, not the curated"
                " set alone",
            )
    return published_schema(curated)


def _empty(where: str) -> UsageError:
    return UsageError(
        f"the curated set {where} is empty",
        "there is nothing to publish: lower curation.min_speedup",
    )


def _rows(line: Lineage) -> pl.DataFrame:
    """One line per row, in the order to publish: its place in the snapshot, and its provenance."""
    assert line.verdicts and line.tasks  # `_checked` said so
    where, keys = line.curated.path, {"candidate_id": "text", "task_id": "text"}
    with readable(where):
        rows = line.curated.index(list(keys))
        rows = rows.filter(pl.col("candidate_id").is_first_distinct())
    if rows.is_empty():
        raise _empty(where)
    require(rows, f"the curated set {where}", keys)
    for above, names in ORIGINS.items():
        on = "task_id" if above == "tasks" else "candidate_id"
        found = select(getattr(line, above), list(names.values()), on, rows)
        if above == "tasks":  # a row without its task has no licence
            config = source_of(line.tasks).manifest.get("config") or {}
            licences = [licence_of(str(each), config) for each in found["source"]]
            found = found.with_columns(task_license=pl.Series(licences, dtype=pl.String))
        published = {path.rpartition(".")[2]: name for name, path in names.items()}
        added = rows.select(on).join(found, on=on, how="left", maintain_order="left").drop(on)
        rows = rows.hstack(added.rename(published, strict=False))
    # a verdict only says "cpu"; which one it was is known of the whole snapshot
    cpu = str(line.verdicts.manifest.get("device") or "cpu")
    defaults = {"device": None, "sample_index": 0, "turn": 1}  # of older snapshots
    absent = {name: pl.lit(each) for name, each in defaults.items() if name not in rows.columns}
    return (
        rows.with_columns(**absent)
        .with_columns(pl.col("turn").fill_null(1), pl.col("device").replace({"cpu": cpu}))
        .sort("task_id", "sample_index", "candidate_id", nulls_last=True)
    )


# -- how it is written -----------------------------------------------------------------------------


def _written(
    groups: Iterator[pa.Table], schema: pa.Schema, directory: Path, shard_bytes: int
) -> Iterator[tuple[Path, int, int]]:
    """Write files under temporary names; yields each with its rows and distinct tasks. They are
    renamed at the end, when it is known how many there are."""
    group, number = next(groups, None), 0
    while group is not None:
        path = directory / f".{number}.tmp"
        count, tasks = 0, set[str]()
        with (
            path.open("wb") as handle,
            pq.ParquetWriter(handle, schema, **PARQUET_SETTINGS) as writer,
        ):
            while group is not None:
                writer.write_table(group, row_group_size=len(group))
                count += len(group)
                tasks.update(group["task_id"].unique().to_pylist())
                group = next(groups, None)
                if handle.tell() >= shard_bytes:
                    break
        yield path, count, len(tasks)
        number += 1


def _tables(
    curated: Snapshot, rows: pl.DataFrame, schema: pa.Schema, scratch: Path
) -> Iterator[pa.Table]:
    """Tables of the published schema, in order."""
    elsewhere, start = provenance(), 0
    stored = pa.schema([field for field in schema if field.name not in elsewhere])
    tables = tables_in_order(curated, rows, stored, scratch, buffer_bytes=GROUP_BYTES)
    while True:
        with readable(curated.path):
            if (table := next(tables, None)) is None:
                return
        part = rows.slice(start, len(table))
        start += len(table)
        if table["candidate_id"].to_pylist() != part["candidate_id"].to_list():
            raise AssertionError("rows and their provenance are not in one order")
        columns = []
        with readable(f"what {curated.path} was made from"):
            for field in schema:
                found = table if field.name in stored.names else part
                columns.append(_typed(found, field))
        yield pa.table(columns, schema=schema)


def _typed(rows: pa.Table | pl.DataFrame, field: pa.Field) -> pa.Array:
    """A column in the type that is published: null where it is missing, or no struct although one
    is wanted."""
    if isinstance(rows, pa.Table):
        return rows[field.name]
    kind = rows.schema.get(field.name)
    if kind is None or (pa.types.is_struct(field.type) and not isinstance(kind, pl.Struct)):
        return pa.nulls(len(rows), field.type)
    return rows[field.name].to_arrow().cast(field.type)


def _row_groups(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """The same rows cut where their own number and weight say, whatever tables they came in."""
    kept: list[pa.Table] = []
    rows = weight = 0
    for table in tables:
        start = 0
        for number, row_bytes in enumerate(_weights(table)):
            if rows and (rows == GROUP_ROWS or weight + row_bytes > GROUP_BYTES):
                kept.append(table.slice(start, number - start))
                yield pa.concat_tables(kept).combine_chunks()
                kept, start, rows, weight = [], number, 0, 0
            rows, weight = rows + 1, weight + row_bytes
        kept.append(table.slice(start))
    if rows:
        yield pa.concat_tables(kept).combine_chunks()


def _weights(table: pa.Table) -> list[int]:
    """Bytes of each row's texts: what a row weighs, near enough."""
    sizes = selectors.string().str.len_bytes().cast(pl.Int64)
    return pl.DataFrame(table).select(pl.sum_horizontal(sizes)).to_series().to_list()
