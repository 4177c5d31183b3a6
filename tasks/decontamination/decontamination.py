"""Remove training tasks that the benchmark contains (docs/explanation/decontamination.md). Code is
never run.

Guarantees: row order does not matter; a removed task has the first level that finds it
(`config.LEVELS`) and its smallest equal benchmark task_id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import polars as pl

from kernels_eval.errors import UsageError
from tasks.decontamination.config import LEVELS, DecontaminationConfig, Level
from tasks.decontamination.matching import Fingerprint, Index, fingerprints
from tasks.reporting.page import markdown
from tasks.reporting.parts import Part, Table

EXAMPLES = 3
EXAMPLE = "{task_id} = {benchmark_task_id} ({detail})"


@dataclass(frozen=True)
class Compared:
    """Kept ids in order, and a row with `level` for each removed one."""

    kept: tuple[str, ...]
    removed: pl.DataFrame
    levels: tuple[Level, ...]

    @property
    def counts(self) -> dict[str, int]:
        found = self.removed["level"].to_list()
        return {level: found.count(level) for level in self.levels}


@dataclass(frozen=True)
class Decontaminated(Compared):
    """Kept and removed tasks. `untraced` task_ids have no graph and were compared as text.
    `removed` has task_id, level, benchmark_task_id, similarity (1.0 except for "near") and
    detail."""

    untraced: tuple[str, ...] = ()

    def examples(self, limit: int = EXAMPLES) -> dict[str, list[dict[str, object]]]:
        """Each level's first removed rows, by task_id."""
        rows = {level: self.removed.filter(level=level).head(limit) for level in self.levels}
        return {level: found.to_dicts() for level, found in rows.items()}

    def markdown(self) -> str:
        total = len(self.kept) + self.removed.height
        rows = [
            (level, str(self.counts[level]), "; ".join(map(EXAMPLE.format_map, examples)))
            for level, examples in self.examples().items()
        ]
        header = ("level", "removed", "examples (training task = benchmark task)")
        parts: list[Part] = [
            f"{self.removed.height} of {total} training tasks are left out.",
            Table(header, rows),
        ]
        if self.untraced:
            more = ", ..." if len(self.untraced) > EXAMPLES else ""
            parts.append(
                f"{len(self.untraced)} could not be run and were compared as text only, exact and"
                f" near: {', '.join(self.untraced[:EXAMPLES])}{more}."
            )
        return markdown(*parts)


def decontaminate(
    tasks: pl.DataFrame, benchmark: pl.DataFrame, config: DecontaminationConfig
) -> Decontaminated:
    """Compare `tasks` with `benchmark`: frames with `task_id`, `code` and workload `graph` (null
    without one).

    All are kept unless `config.enabled`. Raises UsageError for a missing column, or an enabled
    comparison without benchmark tasks.
    """
    if not config.enabled:
        ids = tasks["task_id"].unique().sort().to_list()
        return Decontaminated(tuple(ids), removed_frame([]), LEVELS)
    if benchmark.is_empty():
        raise UsageError(
            "there is no benchmark task to compare with",
            "name some with benchmark.tasks, or set decontamination.enabled=false",
        )
    return compare(fingerprints(tasks), fingerprints(benchmark))


def compare(tasks: Sequence[Fingerprint], benchmark: Iterable[Fingerprint]) -> Decontaminated:
    """`decontaminate` for fingerprints, in time and memory linear in the tasks."""
    index = Index()
    for task in sorted(benchmark, key=lambda task: task.task_id):
        index.add(task)
    ordered = sorted(tasks, key=lambda task: task.task_id)
    found = {task.task_id: index.find(task) for task in ordered}
    return Decontaminated(
        kept=tuple(name for name, match in found.items() if match is None),
        removed=removed_frame([(name, *match) for name, match in found.items() if match]),
        levels=index.levels,
        untraced=tuple(task.task_id for task in ordered if task.graph is None),
    )


def removed_frame(rows: Sequence[tuple[str, Level, str, float, str]]) -> pl.DataFrame:
    texts = ("task_id", "level", "benchmark_task_id", "similarity", "detail")
    schema = dict.fromkeys(texts, pl.String()) | {"similarity": pl.Float64()}
    return pl.DataFrame(rows, schema=schema, orient="row")
