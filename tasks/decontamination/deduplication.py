"""Tasks and samples that a set holds more than once.

Guarantees: the result depends on the rows alone, not on their order: of equals the smallest id
stays, and every removed row says which one it equals, which is always a row that stays. Code is
never run. Samples are compared within their task only: the same kernel for two tasks is two
samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field

from kernels_eval.errors import UsageError
from tasks.decontamination.decontamination import Index
from tasks.decontamination.fingerprints import LEVELS, Level, Matching, NearIndex, fingerprints
from tasks.decontamination.normalise import canonical

if TYPE_CHECKING:
    import polars as pl

SAMPLE_LEVELS: tuple[Level, ...] = ("exact", "normalised")


class DeduplicationConfig(Matching):
    """When two rows of a set are one. Changed sizes make another task here, unless `levels` has
    "shapes"."""

    enabled: bool = Field(
        default=True, description="keep one of equal tasks and one of equal kernels of a task"
    )
    levels: tuple[Level, ...] = Field(
        default=("exact", "normalised"),
        min_length=1,
        description="tasks: comparisons, in decontamination's order",
    )


@dataclass(frozen=True)
class Deduplicated:
    """`kept`: ids in order. `removed`: id, level, equals (the id that stays), similarity (1.0 but
    for "near")."""

    kept: tuple[str, ...]
    removed: pl.DataFrame
    levels: tuple[Level, ...]

    @property
    def counts(self) -> dict[str, int]:
        found = dict(self.removed["level"].value_counts().iter_rows())
        return {level: found.get(level, 0) for level in self.levels}


def deduplicate_tasks(tasks: pl.DataFrame, config: DeduplicationConfig) -> Deduplicated:
    """Of equal tasks (columns task_id, code, entry_point where there is one) the one with the
    smallest task_id. Raises UsageError for a missing column."""
    _require(tasks, ("task_id", "code"))
    levels = tuple(level for level in LEVELS if level in config.levels)
    if not config.enabled:
        return Deduplicated(tuple(tasks["task_id"].unique().sort().to_list()), _frame([]), levels)
    index = Index(levels, config.min_operators, NearIndex(config))
    kept, removed = [], []
    for task in fingerprints(tasks):
        found = index.find(task)
        if found:
            level, equal, similarity, _ = found
            removed.append((task.task_id, level, equal, similarity))
        else:
            index.add(task)
            kept.append(task.task_id)
    return Deduplicated(tuple(kept), _frame(removed), levels)


def deduplicate_samples(
    samples: pl.DataFrame, config: DeduplicationConfig, entry_point: str = "ModelNew"
) -> Deduplicated:
    """Of a task's equal kernels (columns candidate_id, task_id, code) the one with the smallest
    candidate_id: the same text, or the same program as `normalise` sees it (kernel sources in
    strings count verbatim). Rows without code are all kept. Raises UsageError for a missing column.

    The text is compared first, in one vectorised pass; only kernels of tasks with several different
    texts are parsed, about 5 ms each.
    """
    import polars as pl

    _require(samples, ("candidate_id", "task_id", "code"))
    rows = (
        samples.select("candidate_id", "task_id", "code")
        .unique("candidate_id", keep="first", maintain_order=True)
        .sort("candidate_id")
    )
    if not config.enabled:
        return Deduplicated(tuple(rows["candidate_id"].to_list()), _frame([]), SAMPLE_LEVELS)
    coded = rows.filter(pl.col("code").is_not_null()).with_columns(
        text=pl.col("code").str.strip_chars()
    )
    coded = coded.with_columns(equals=pl.col("candidate_id").first().over("task_id", "text"))
    repeated = coded.filter(pl.col("equals") != pl.col("candidate_id"))
    removed: list[tuple] = [
        (*row, 1.0)
        for row in repeated.select("candidate_id", pl.lit("exact"), "equals").iter_rows()
    ]
    left = coded.filter(pl.col("equals") == pl.col("candidate_id")).filter(
        pl.len().over("task_id") > 1
    )
    first: dict[tuple[str, str], str] = {}
    renamed: dict[str, str] = {}
    for candidate_id, task_id, code in left.select("candidate_id", "task_id", "code").iter_rows():
        key = canonical(code, entry_point).normalised
        if (
            key is not None
            and (equal := first.setdefault((task_id, key), candidate_id)) != candidate_id
        ):
            removed.append((candidate_id, "normalised", equal, 1.0))
            renamed[candidate_id] = equal
    # what equals a row that goes equals the row that stays for it
    removed = [
        (name, level, renamed.get(equal, equal), similarity)
        for name, level, equal, similarity in removed
    ]
    gone = {row[0] for row in removed}
    return Deduplicated(
        tuple(name for name in rows["candidate_id"].to_list() if name not in gone),
        _frame(sorted(removed)),
        SAMPLE_LEVELS,
    )


def _frame(rows: list[tuple]) -> pl.DataFrame:
    import polars as pl

    return pl.DataFrame(
        rows,
        schema={"id": pl.String, "level": pl.String, "equals": pl.String, "similarity": pl.Float64},
        orient="row",
    )


def _require(frame: pl.DataFrame, columns: Sequence[str]) -> None:
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        raise UsageError(
            f"deduplication needs the columns {', '.join(missing)}",
            f"give a frame with {', '.join(columns)}",
        )
