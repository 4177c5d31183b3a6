"""The numbers of a published folder, read from its files: what the card says is what the files
hold.

Memory holds the small columns of one configuration, no texts but those of the one example.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels_eval.records import Record
from tasks.publishing.shards import Shard

if TYPE_CHECKING:
    import polars as pl

COUNTED = (
    "criterion",
    "operator_kind",
    "language",
    "generator",
    "device",
    "task_source",
    "task_license",
    "turn",
)
MEASURED = ("reasoning_tokens", "speedup")
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
LONGEST_EXAMPLE_CHARACTERS = 20_000


class Statistics(Record):
    """Of one configuration: rows and distinct tasks; how many rows have each value; quantiles by
    share, of values above 0 that are numbers; one row to show."""

    rows: int
    tasks: int
    counts: dict[str, dict[str, int]]
    quantiles: dict[str, dict[str, float]]
    shared_programs: int
    example: dict[str, str]


def statistics_of(folder: Path, shards: Sequence[Shard]) -> Statistics:
    """The statistics of these files, which are of one configuration."""
    import polars as pl

    files = [folder / shard.path for shard in shards]
    rows = pl.scan_parquet(files).select("task_id", *COUNTED, *MEASURED).collect()
    quantiles = {}
    for name in MEASURED:
        values = rows[name].cast(pl.Float64, strict=False).drop_nulls()
        values = values.filter(values.is_finite() & (values > 0))
        if len(values):
            quantiles[name] = {
                f"{share:g}": round(float(values.quantile(share, "linear") or 0.0), 4)
                for share in QUANTILES
            }
    return Statistics(
        rows=len(rows),
        tasks=rows["task_id"].n_unique(),
        counts={name: _counts(rows[name]) for name in COUNTED},
        quantiles=quantiles,
        shared_programs=_shared_programs(folder, shards),
        example=_example(files[0]),
    )


def _counts(values: pl.Series) -> dict[str, int]:
    """The most frequent first, then by name; a null is not counted."""
    counts = values.drop_nulls().value_counts().iter_rows()
    return {
        str(name): count
        for name, count in sorted(counts, key=lambda pair: (-pair[1], str(pair[0])))
    }


def _shared_programs(folder: Path, shards: Sequence[Shard]) -> int:
    """How many programs lie in more than one split: as the same text under several task_ids."""
    import polars as pl

    found: dict[str, pl.DataFrame] = {}
    for split in sorted({shard.split for shard in shards}):
        files = [folder / shard.path for shard in shards if shard.split == split]
        found[split] = (
            pl.scan_parquet(files)
            .select(pl.col("task_code").hash(0).alias("code"))
            .unique()
            .collect(engine="streaming")
        )
    if len(found) < 2:
        return 0
    first, second = found.values()
    return len(first.join(second, on="code", how="semi"))


def _example(file: Path) -> dict[str, Any]:
    """The row of the first row group with the shortest texts: whole texts are worth more to a
    reader than the head of long ones."""
    import pyarrow.parquet as pq

    names = ["task_id", "task_code", "reasoning", "code"]
    with pq.ParquetFile(file) as parquet:
        rows = parquet.read_row_group(0, columns=names).to_pylist()
    rows = [
        {name: str(value or "")[:LONGEST_EXAMPLE_CHARACTERS] for name, value in row.items()}
        for row in rows
    ]
    return min(rows, key=lambda row: (sum(map(len, row.values())), row["task_id"]))
