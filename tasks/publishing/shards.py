"""A curated snapshot as Parquet shards, each row with where it comes from.

Guarantees: the same rows give the same bytes under the same pyarrow, however they were divided into
parts; rows ascend by task_id, sample_index, candidate_id; a shard is closed by the first row group
that brings it to the limit (a row group holds at most 1,000 rows and, unless a single row weighs
more, 32 MiB of uncompressed data); a task's split follows from the seed and its id alone, so no
refresh moves it. Memory holds the ids and provenance of all rows (about 0.5 kB a row), and one
bucket and one row group of texts.

Does not guarantee that both splits have no program in common: two task_ids may name the same
program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kernels_eval.errors import UsageError
from kernels_eval.records import Record
from tasks.publishing.columns import (
    OF_CANDIDATES,
    OF_TASKS,
    OF_TIMING,
    OF_VERDICTS,
    REQUIRED,
    licence_of,
    provenance_schema,
    published_schema,
)
from tasks.publishing.config import PublishOptions
from tasks.publishing.lineage import (
    ABOVE,
    Lineage,
    manifest_of,
    readable,
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
    **({"use_content_defined_chunking": True} if int(pa.__version__.split(".")[0]) >= 21 else {}),
}
AGAIN = "curate again with this version"


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
    UsageError where the snapshot lacks columns or rows, where what it was made from is not there,
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
    if missing := [name for name in REQUIRED if name not in curated.names]:
        raise UsageError(f"the curated set {where} lacks the columns {', '.join(missing)}", AGAIN)
    for name in REQUIRED:
        kind = curated.field(name).type
        what, fits = "text", pa.types.is_string(kind) or pa.types.is_large_string(kind)
        if name == "speedup":
            what, fits = "a number", pa.types.is_integer(kind) or pa.types.is_floating(kind)
        if not (fits or pa.types.is_null(kind)):
            raise UsageError(f"the column {name} of {where} is {kind}, not {what}", AGAIN)
    for name in ("candidates", "verdicts", "tasks"):
        if getattr(line, name) is None:
            raise UsageError(
                f"the {ABOVE[name][-1]} snapshot that {where} was made from is not there",
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
    """One line a row, in the order to publish: its place in the snapshot, and its provenance."""
    assert line.candidates and line.verdicts and line.tasks  # `_checked` said so
    where = line.curated.path
    with readable(where):
        index = line.curated.index(["candidate_id", "task_id"])
        index = index.unique("candidate_id", keep="first", maintain_order=True)
    if index.is_empty():
        raise _empty(where)
    if index["candidate_id"].has_nulls() or index["task_id"].has_nulls():
        raise UsageError(f"the curated set {where} has rows without candidate_id or task_id", AGAIN)
    ids = index.select("candidate_id")
    candidates = _provenance(line.candidates, OF_CANDIDATES, "candidate_id", ids)
    verdicts = _verdicts(line.verdicts, ids)
    tasks = _provenance(line.tasks, OF_TASKS, "task_id", index.select("task_id").unique())
    config = manifest_of(source_of(line.tasks)).get("config") or {}
    licences = [licence_of(str(source), config) for source in tasks["task_source"]]
    tasks = tasks.with_columns(task_license=pl.Series(licences, dtype=pl.String))
    rows = (
        index.join(candidates, on="candidate_id", how="left")
        .join(verdicts, on="candidate_id", how="left")
        .join(tasks, on="task_id", how="left")
    )
    # Older snapshots have no turns: all answers were the first.
    for name, default in (("sample_index", 0), ("turn", 1)):
        if name not in rows.columns:
            rows = rows.with_columns(pl.lit(default, pl.Int64).alias(name))
    rows = rows.with_columns(pl.col("turn").fill_null(1))
    return rows.sort("task_id", "sample_index", "candidate_id", nulls_last=True)


def _provenance(
    snapshot: Snapshot, names: Mapping[str, str], on: str, keys: pl.DataFrame
) -> pl.DataFrame:
    """Columns of a snapshot under the names that are published."""
    found = select(snapshot, [on, *names.values()], on, keys)
    return found.rename({there: name for name, there in names.items()}, strict=False)


def _verdicts(verdicts: Snapshot, ids: pl.DataFrame) -> pl.DataFrame:
    found = _provenance(verdicts, {**OF_VERDICTS, "timing": "timing"}, "candidate_id", ids)
    if "timing" in found.columns:
        kind = found.schema["timing"]
        fields = {field.name for field in getattr(kind, "fields", [])}
        if not fields and found["timing"].null_count() < len(found):
            raise UsageError(
                f"the column timing of {verdicts.path} is {kind}, no struct",
                "it was not written by this version: verify again under another root",
            )
        times = (pl.col("timing").struct.field(name) for name in OF_TIMING if name in fields)
        found = found.with_columns(times).drop("timing")
    if "device" in found.columns:
        # a verdict only says "cpu"; which one it was is known of the whole snapshot
        cpu = str(manifest_of(verdicts).get("device") or "cpu")
        found = found.with_columns(pl.col("device").replace({"cpu": cpu}))
    return found


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
    elsewhere, start = provenance_schema().names, 0
    stored = pa.schema([field for field in schema if field.name not in elsewhere])
    tables = tables_in_order(curated, rows, stored, scratch)
    while (table := _next(tables, curated)) is not None:
        part = rows.slice(start, len(table))
        start += len(table)
        if table["candidate_id"].to_pylist() != part["candidate_id"].to_list():
            raise AssertionError("rows and their provenance are not in one order")
        columns = []
        for field in schema:
            if field.name in stored.names:
                columns.append(table[field.name])
            elif field.name in part.columns:
                with readable(f"the column {field.name} of what {curated.path} was made from"):
                    columns.append(_typed(part[field.name].to_arrow(), field.type))
            else:
                columns.append(pa.nulls(len(table), field.type))
        yield pa.table(columns, schema=schema)


def _next(tables: Iterator[pa.Table], curated: Snapshot) -> pa.Table | None:
    with readable(curated.path):
        return next(tables, None)


def _typed(values: pa.Array, wanted: pa.DataType) -> pa.Array:
    """The values in the type that is published; a struct's missing fields (an older snapshot) are
    null."""
    if not pa.types.is_struct(wanted):
        return values.cast(wanted)
    if not pa.types.is_struct(values.type):
        return pa.nulls(len(values), wanted)
    fields = [
        pa.nulls(len(values), field.type)
        if values.type.get_field_index(field.name) < 0
        else _typed(values.field(field.name), field.type)
        for field in wanted
    ]
    return pa.StructArray.from_arrays(fields, fields=list(wanted), mask=values.is_null())


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
    total = np.zeros(len(table), dtype=np.int64)
    for column in table.columns:
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            total += pc.fill_null(pc.binary_length(column), 0).to_numpy().astype(np.int64)
    return [int(each) for each in total]
