"""Tasks and samples that a set holds more than once.

Guarantees: the result depends on the rows alone, not on their order: of equals the smallest id
stays, and every removed row says which one it equals, which is always a row that stays. Code is
never run. Samples are compared within their task only: the same kernel for two tasks is two
samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from tasks.decontamination.config import DeduplicationConfig, Level
from tasks.decontamination.decontamination import COLUMNS
from tasks.decontamination.fingerprints import Compared, Index, fingerprints, require_columns
from tasks.decontamination.normalise import canonical

SAMPLE_LEVELS: tuple[Level, ...] = ("exact", "normalised")


def deduplicate_tasks(tasks: pl.DataFrame, config: DeduplicationConfig) -> Compared:
    """Of equal tasks (columns task_id, code, entry_point where there is one) keep the one with the
    smallest task_id. Raises UsageError for a missing column."""
    require_columns(tasks, COLUMNS, "tasks")
    index = Index(config.levels, config)
    if not config.enabled:
        return _compared(tasks["task_id"].unique().sort().to_list(), [], index.levels)
    kept, removed = [], []
    for task in fingerprints(tasks):
        if found := index.find(task):
            removed.append((task.task_id, found.level, found.task_id, found.similarity))
        else:
            index.add(task)
            kept.append(task.task_id)
    return _compared(kept, removed, index.levels)


def deduplicate_samples(
    samples: pl.DataFrame, config: DeduplicationConfig, entry_point: str = "ModelNew"
) -> Compared:
    """Of a task's equal kernels (columns candidate_id, task_id, code) keep the one with the
    smallest candidate_id.

    Equal are the same text, or the same program as `normalise` sees it (kernel sources in strings
    count verbatim). Rows without code are all kept. Texts are compared first, in one vectorised
    pass; only kernels of tasks with several different texts are parsed, about 5 ms each. Raises
    UsageError for a missing column.
    """
    columns = ("candidate_id", "task_id", "code")
    require_columns(samples, columns, "samples")
    rows = samples.select(columns).unique("candidate_id", keep="first", maintain_order=True)
    rows = rows.sort("candidate_id")
    ids = rows["candidate_id"].to_list()
    if not config.enabled:
        return _compared(ids, [], SAMPLE_LEVELS)
    coded = rows.filter(pl.col("code").is_not_null()).with_columns(
        equals=pl.col("candidate_id").first().over("task_id", pl.col("code").str.strip_chars())
    )
    same = pl.col("equals") == pl.col("candidate_id")
    equals: dict[str, tuple[Level, str]] = {
        name: ("exact", equal)
        for name, equal in coded.filter(~same).select("candidate_id", "equals").iter_rows()
    }
    first: dict[tuple[str, str], str] = {}
    several = coded.filter(same).filter(pl.len().over("task_id") > 1)
    for name, task_id, code in several.select(columns).iter_rows():
        key = canonical(code, entry_point).normalised
        equal = first.setdefault((task_id, key), name) if key else name
        if equal != name:
            equals[name] = ("normalised", equal)
    removed = [
        # what equals a removed row equals the row that stays for that one
        (name, level, equals[equal][1] if equal in equals else equal, 1.0)
        for name, (level, equal) in sorted(equals.items())
    ]
    return _compared([name for name in ids if name not in equals], removed, SAMPLE_LEVELS)


def _compared(
    kept: Sequence[str],
    removed: Sequence[tuple[str, Level, str, float]],
    levels: tuple[Level, ...],
) -> Compared:
    """`removed`: id, level, equals (the id that stays), similarity (1.0 but for "near")."""
    schema = {"id": pl.String, "level": pl.String, "equals": pl.String, "similarity": pl.Float64}
    return Compared(tuple(kept), pl.DataFrame(removed, schema=schema, orient="row"), levels)
