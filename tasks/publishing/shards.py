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
from typing import TYPE_CHECKING, Any

from kernels_eval.errors import UsageError
from kernels_eval.records import Record
from tasks.publishing.columns import (
    OF_CANDIDATES,
    OF_TASKS,
    OF_VERDICTS,
    REQUIRED,
    STAGE_OF,
    licence_of,
    provenance_schema,
    published_schema,
)
from tasks.publishing.lineage import Lineage, manifest_of, readable, select, source_of
from tasks.sources.holdout import place_of
from tasks.store import tables_in_order

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

TRAIN, TEST = "train", "test"
GROUP_ROWS = 1000
GROUP_BYTES = 32 * 2**20
SHARD_BYTES = 300 * 2**20


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
    *,
    config: str,
    directory: str = "data",
    scratch: Path,
    holdout_share: float = 0.0,
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
) -> list[Shard]:
    """Write `directory/{split}-{number}-of-{count}.parquet` under `folder`; returns them, `train`
    first.

    `scratch` is a directory that nobody needs afterwards, with room for the rows once. Raises
    UsageError where the snapshot lacks columns or rows, where what it was made from is not there,
    and where `holdout_share` leaves nothing to train on.
    """
    import polars as pl

    schema, rows = _checked(line), _rows(line)
    names = rows["task_id"].unique(maintain_order=True).to_list()
    splits = {name: split_of(name, seed, holdout_share) for name in names}
    rows = rows.with_columns(
        pl.col("task_id").replace_strict(splits, return_dtype=pl.String).alias("split")
    )
    found = []
    for split in (TRAIN, TEST):
        chosen = rows.filter(pl.col("split") == split)
        if chosen.is_empty():
            if split == TRAIN:
                raise UsageError(
                    f"the hold-out takes all {len(names)} tasks", "hold out a smaller share"
                )
            continue
        found += _write_split(
            line,
            folder,
            schema,
            chosen,
            Named(config, split, directory),
            scratch / split,
            shard_bytes,
        )
    return found


class Named:
    """What the files of one split are called."""

    def __init__(self, config: str, split: str, directory: str) -> None:
        self.config, self.split, self.directory = config, split, directory

    def path(self, number: int, count: int) -> str:
        return f"{self.directory}/{self.split}-{number:05d}-of-{count:05d}.parquet"


def _checked(line: Lineage) -> pa.Schema:
    """The schema to publish."""
    import pyarrow as pa

    with readable(f"the columns of {line.curated.path}"):
        curated = line.curated.schema()
    if not curated.names:
        raise UsageError(
            f"the curated set {line.curated.path} is empty",
            "there is nothing to publish: lower curation.min_speedup",
        )
    if missing := [name for name in REQUIRED if name not in curated.names]:
        raise UsageError(
            f"the curated set {line.curated.path} lacks the columns {', '.join(missing)}",
            "curate again with this version",
        )
    for name in REQUIRED:
        kind = curated.field(name).type
        wanted = (
            (pa.types.is_integer, pa.types.is_floating)
            if name == "speedup"
            else (pa.types.is_string, pa.types.is_large_string)
        )
        if not any(is_so(kind) for is_so in (*wanted, pa.types.is_null)):
            what = "a number" if name == "speedup" else "text"
            raise UsageError(
                f"the column {name} of {line.curated.path} is {kind}, not {what}",
                "curate again with this version",
            )
    for name, stage in STAGE_OF.items():
        if getattr(line, name) is None:
            raise UsageError(
                f"the {stage} snapshot that {line.curated.path} was made from is not there",
                "rows are published with where they come from: copy the whole root, not the curated"
                " set alone",
            )
    return published_schema(curated)


def _rows(line: Lineage) -> pl.DataFrame:
    """One line a row, in the order to publish: its place in the snapshot, and its provenance."""
    import polars as pl

    assert line.candidates and line.verdicts and line.tasks  # `_checked` said so
    with readable(line.curated.path):
        index = line.curated.index(["candidate_id", "task_id"]).unique(
            "candidate_id", keep="first", maintain_order=True
        )
    if index.is_empty():
        raise UsageError(
            f"the curated set {line.curated.path} is empty",
            "there is nothing to publish: lower curation.min_speedup",
        )
    if index["candidate_id"].has_nulls() or index["task_id"].has_nulls():
        raise UsageError(
            f"the curated set {line.curated.path} has rows without candidate_id or task_id",
            "curate again with this version",
        )
    ids, names = index.select("candidate_id"), index.select("task_id").unique()
    candidates = select(line.candidates, OF_CANDIDATES, "candidate_id", ids)
    verdicts = select(line.verdicts, OF_VERDICTS, "candidate_id", ids).rename(
        {"schema_version": "verdict_schema_version"}, strict=False
    )
    if "timing" in verdicts.columns:
        there = {field.name for field in getattr(verdicts.schema["timing"], "fields", [])}
        if not there and verdicts["timing"].null_count() < len(verdicts):
            problem = (
                f"the column timing of {line.verdicts.path} is {verdicts.schema['timing']}, no"
                " struct"
            )
            raise UsageError(
                problem, "it was not written by this version: verify again under another root"
            )
        names_of_times = [
            name for name in ("speedup_upper", "reference_ms", "candidate_ms") if name in there
        ]
        fields = [pl.col("timing").struct.field(name) for name in names_of_times]
        verdicts = verdicts.with_columns(*fields).drop("timing")
    if (
        "device" in verdicts.columns
    ):  # a verdict only says "cpu"; which one it was is known of the whole snapshot
        told = str(manifest_of(line.verdicts).get("device") or "cpu")
        verdicts = verdicts.with_columns(pl.col("device").replace({"cpu": told}))
    tasks = select(line.tasks, OF_TASKS, "task_id", names).rename(
        {"source": "task_source", "level": "task_level"}, strict=False
    )
    config = manifest_of(source_of(line.tasks)).get("config") or {}
    licences = pl.Series(
        "task_license",
        [licence_of(str(source), config) for source in tasks["task_source"]],
        dtype=pl.String,
    )
    rows = index.join(candidates, on="candidate_id", how="left").join(
        verdicts, on="candidate_id", how="left"
    )
    rows = rows.join(tasks.with_columns(licences), on="task_id", how="left")
    if "sample_index" not in rows.columns:
        rows = rows.with_columns(pl.lit(0, pl.Int64).alias("sample_index"))
    if "turn" in rows.columns:
        rows = rows.with_columns(
            pl.col("turn").fill_null(1)
        )  # before there were turns, all were the first
    else:
        rows = rows.with_columns(pl.lit(1, pl.Int64).alias("turn"))
    return rows.sort("task_id", "sample_index", "candidate_id", nulls_last=True)


def _write_split(
    line: Lineage,
    folder: Path,
    schema: pa.Schema,
    rows: pl.DataFrame,
    named: Named,
    scratch: Path,
    shard_bytes: int,
) -> list[Shard]:
    """Files are written under numbers and get their names at the end, when it is known how many
    there are."""
    import pyarrow.parquet as pq

    (folder / named.directory).mkdir(parents=True, exist_ok=True)
    written: list[tuple[Path, int, int]] = []
    groups = _row_groups(_joined(line, rows, schema, scratch))
    group = next(groups, None)
    while group is not None:
        path = folder / named.directory / f".{named.split}-{len(written)}.tmp"
        count, tasks = 0, set()
        with open(path, "wb") as handle, pq.ParquetWriter(handle, schema, **_settings()) as writer:
            while group is not None:
                writer.write_table(group, row_group_size=len(group))
                count += len(group)
                tasks.update(group["task_id"].unique().to_pylist())
                group = next(groups, None)
                if handle.tell() >= shard_bytes:
                    break
        written.append((path, count, len(tasks)))
    shards = []
    for number, (path, count, tasks) in enumerate(written):
        name = named.path(number, len(written))
        path.rename(folder / name)
        size_bytes = (folder / name).stat().st_size
        shards.append(
            Shard(
                config=named.config,
                split=named.split,
                path=name,
                rows=count,
                tasks=tasks,
                size_bytes=size_bytes,
            )
        )
    return shards


def _settings() -> Mapping[str, Any]:
    """Content-defined pages, where pyarrow knows them: rows that a refresh adds leave most other
    pages as they were, and a hub that keeps what it has seen before is sent little."""
    import pyarrow as pa

    settings: dict[str, Any] = {
        "compression": "zstd",
        "compression_level": 6,
        "write_page_index": True,
    }
    return settings | (
        {"use_content_defined_chunking": True} if int(pa.__version__.split(".")[0]) >= 21 else {}
    )


def _joined(
    line: Lineage, rows: pl.DataFrame, schema: pa.Schema, scratch: Path
) -> Iterator[pa.Table]:
    """Tables of the published schema, in order."""
    import pyarrow as pa

    provenance, start = provenance_schema(), 0
    stored = pa.schema([field for field in schema if field.name not in provenance.names])
    for table in _stored(line, rows, stored, scratch):
        part = rows.slice(start, len(table))
        start += len(table)
        if table["candidate_id"].to_pylist() != part["candidate_id"].to_list():
            raise AssertionError("rows and their provenance are not in one order")
        columns = {}
        for field in schema:
            if field.name in stored.names:
                columns[field.name] = table[field.name]
            elif field.name in part.columns:
                with readable(f"the column {field.name} of what {line.curated.path} was made from"):
                    columns[field.name] = _typed(part[field.name].to_arrow(), field.type)
            else:
                columns[field.name] = pa.nulls(len(table), field.type)
        yield pa.table(columns, schema=schema)


def _stored(
    line: Lineage, rows: pl.DataFrame, schema: pa.Schema, scratch: Path
) -> Iterator[pa.Table]:
    with readable(line.curated.path):
        yield from tables_in_order(line.curated, rows, schema, scratch)


def _typed(values: pa.Array, wanted: pa.DataType) -> pa.Array:
    """The values in the type that is published; a struct's missing fields (an older snapshot) are
    null."""
    import pyarrow as pa

    if not pa.types.is_struct(wanted):
        return values.cast(wanted)
    if not pa.types.is_struct(values.type):
        return pa.nulls(len(values), wanted)
    there = {values.type.field(i).name for i in range(values.type.num_fields)}
    fields = [
        (
            _typed(values.field(field.name), field.type)
            if field.name in there
            else pa.nulls(len(values), field.type)
        )
        for field in wanted
    ]
    return pa.StructArray.from_arrays(fields, fields=list(wanted), mask=values.is_null())


def _row_groups(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """The same rows cut where their own number and weight say, whatever tables they came in."""
    import pyarrow as pa

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
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    total = np.zeros(len(table), dtype=np.int64)
    for column, field in zip(table.columns, table.schema, strict=True):
        if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
            total += pc.fill_null(pc.binary_length(column), 0).to_numpy().astype(np.int64)
    return total.tolist()
