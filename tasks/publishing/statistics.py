"""The numbers of a published folder: what its files hold, and what its tasks compute.

Memory holds the small columns of one configuration, and no texts but those of the one example.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq

from kernels_eval.records import Record
from tasks.publishing.lineage import Lineage, select
from tasks.publishing.shards import TEST, TRAIN, Shard
from tasks.reporting.text import by_count

COUNTED = (
    *("criterion", "operator_kind", "language", "generator"),
    *("device", "task_source", "task_license", "turn"),
)
MEASURED = ("reasoning_tokens", "speedup")
OF_TASKS = ("arithmetic_intensity", "flops", "bytes_min")
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
MAX_EXAMPLE_CHARACTERS = 20_000


class Statistics(Record):
    """Of one configuration: rows and distinct tasks; how many rows have each value; quantiles by
    share, of values above 0 that are numbers; one row to show."""

    rows: int
    tasks: int
    counts: dict[str, dict[str, int]]
    quantiles: dict[str, dict[str, float]]
    shared_programs: int
    example: dict[str, str]


class Workloads(Record):
    """Of the `tasks` distinct tasks of a set: how many could be `counted`, how many run each family
    of operators, quantiles by share."""

    tasks: int
    counted: int
    families: dict[str, int]
    quantiles: dict[str, dict[str, float]]


def statistics_of(folder: Path, shards: Sequence[Shard]) -> Statistics:
    """The statistics of these files, which are of one configuration."""
    files = {shard.path: folder / shard.path for shard in shards}
    rows = pl.scan_parquet(list(files.values())).select("task_id", *COUNTED, *MEASURED).collect()
    measured = {name: rows[name].cast(pl.Float64, strict=False) for name in MEASURED}
    usable = {name: each.filter(each.is_finite() & (each > 0)) for name, each in measured.items()}
    programs = [
        pl.scan_parquet([files[shard.path] for shard in shards if shard.split == split])
        .select(code=pl.col("task_code").hash(0))
        .unique()
        for split in (TRAIN, TEST)
        if any(shard.split == split for shard in shards)
    ]
    # the same text under several task_ids
    shared = programs[0].join(programs[-1], on="code", how="semi") if len(programs) > 1 else None
    return Statistics(
        rows=len(rows),
        tasks=rows["task_id"].n_unique(),
        counts={name: _counts(rows[name]) for name in COUNTED},
        quantiles={name: _quantiles(each, 4) for name, each in usable.items() if len(each)},
        shared_programs=0 if shared is None else len(shared.collect(engine="streaming")),
        example=_example(files[shards[0].path]),
    )


def workloads_of(line: Lineage) -> Workloads | None:
    """The workloads of the tasks in a set, of the snapshot that it was curated with. None where it
    was curated without."""
    if line.workloads is None:
        return None
    tasks = select(line.curated, [], "task_id")
    known = select(line.workloads, ["families", "executed", *OF_TASKS], "task_id", tasks)
    rows = tasks.join(known, on="task_id", how="left")
    measured = {name: rows[name].cast(pl.Float64).drop_nulls() for name in OF_TASKS}
    return Workloads(
        tasks=rows.height,
        counted=rows.height - rows["executed"].null_count(),
        families=_counts(rows["families"].list.explode(empty_as_null=False)),
        quantiles={name: _quantiles(each) for name, each in measured.items() if len(each)},
    )


def _quantiles(values: pl.Series, digits: int = 400) -> dict[str, float]:
    """Rounded to `digits`; by default not at all."""
    found = {f"{share:g}": values.quantile(share, "linear") for share in QUANTILES}
    return {share: round(float(value or 0.0), digits) for share, value in found.items()}


def _counts(values: pl.Series) -> dict[str, int]:
    """The most frequent first, then by name; a null is not counted."""
    counts = values.drop_nulls().value_counts().iter_rows()
    return dict(by_count({str(name): count for name, count in counts}))


def _example(file: Path) -> dict[str, str]:
    """The row of the first row group with the shortest texts: whole texts are worth more to a
    reader than the head of long ones."""
    names = ["task_id", "task_code", "reasoning", "code"]
    with pq.ParquetFile(file) as parquet:
        rows = parquet.read_row_group(0, columns=names).to_pylist()
    texts = [
        {name: str(value or "")[:MAX_EXAMPLE_CHARACTERS] for name, value in row.items()}
        for row in rows
    ]
    return min(texts, key=lambda row: (sum(map(len, row.values())), row["task_id"]))
