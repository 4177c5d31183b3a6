"""Repeated tasks and samples of a set. The smallest id of equals stays, and removed rows name
it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import polars as pl

from tasks.decontamination.config import DeduplicationConfig, Level
from tasks.decontamination.decontamination import Compared
from tasks.decontamination.kernels import program_key
from tasks.decontamination.matching import Index, fingerprints, require_columns

EQUAL: tuple[Level, ...] = ("exact", "normalised")


def deduplicate_tasks(tasks: pl.DataFrame, config: DeduplicationConfig) -> Compared:
    """Keep the smallest task_id of equal tasks (columns task_id, code, graph). Raises UsageError
    for a missing column."""
    index = Index(EQUAL)
    if not config.enabled:
        return _compared(tasks["task_id"].unique().sort().to_list(), [])
    kept, removed = [], []
    for task in fingerprints(tasks):
        if found := index.find(task):
            removed.append((task.task_id, found.level, found.task_id, found.similarity))
        else:
            index.add(task)
            kept.append(task.task_id)
    return _compared(kept, removed)


def deduplicate_samples(samples: pl.DataFrame, config: DeduplicationConfig) -> Compared:
    """Keep the smallest candidate_id of a task's equal kernels (columns candidate_id, task_id,
    code): the same text or program (`kernels.program_key`). Raises UsageError for a missing
    column."""
    columns = ("candidate_id", "task_id", "code")
    require_columns(samples, columns, "samples")
    rows = samples.select(columns).unique("candidate_id", keep="first", maintain_order=True)
    rows, name, first = rows.sort("candidate_id"), pl.col("candidate_id"), pl.first("candidate_id")
    if not config.enabled:
        return _compared(rows["candidate_id"].to_list(), [])
    coded = rows.drop_nulls("code").with_columns(
        same_text=first.over("task_id", pl.col("code").str.strip_chars())
    )
    parsed = coded.filter(name == pl.col("same_text")).filter(pl.len().over("task_id") > 1)
    rows_to_parse = parsed.select("candidate_id", "code").iter_rows()
    keys = [program_key(code) or own for own, code in rows_to_parse]
    program = pl.Series("key", keys, dtype=pl.String)
    equal = parsed.select(same_text=name, equals=first.over("task_id", program))
    found = (
        coded.join(equal, on="same_text", how="left")
        .with_columns(equals=pl.coalesce("equals", "same_text"))
        .filter(name != pl.col("equals"))
        .sort("candidate_id")
    )
    parsed_equal = pl.when(name == pl.col("same_text"))
    level = parsed_equal.then(pl.lit("normalised")).otherwise(pl.lit("exact")).alias("level")
    removed = found.select(name, level, "equals", similarity=1.0).rows()
    kept = rows.join(found, on="candidate_id", how="anti", maintain_order="left")
    return _compared(kept["candidate_id"].to_list(), removed)


def equal_kernels(config: DeduplicationConfig) -> Callable[[pl.DataFrame], pl.DataFrame] | None:
    """`deduplicate_samples` for curation: rows (candidate_id, task_id, code) that equal another,
    and which. None where not configured."""
    return (lambda rows: deduplicate_samples(rows, config).removed) if config.enabled else None


def _compared(kept: Sequence[str], removed: Sequence[tuple[str, Level, str, float]]) -> Compared:
    schema = {"id": pl.String, "level": pl.String, "equals": pl.String, "similarity": pl.Float64}
    return Compared(tuple(kept), pl.DataFrame(removed, schema=schema, orient="row"), EQUAL)
