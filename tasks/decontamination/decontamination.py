"""Training tasks that the benchmark knows are left out: which, at what level, and for which
benchmark task.

Guarantees: the result depends on the two sets of tasks alone, not on the order of their rows; a
removed task is reported at the first level that finds it (`config.LEVELS`) with the smallest
benchmark task_id that it equals there; code is never run. Does not guarantee that what is kept is
unknown to the benchmark: docs/explanation/decontamination.md says what each level misses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import polars as pl

from kernels_eval.errors import UsageError
from tasks.decontamination.config import DecontaminationConfig, Level
from tasks.decontamination.matching import Fingerprint, Index, fingerprints
from tasks.reporting.page import Table, block_markdown
from tasks.reporting.text import cell

EXAMPLES = 3
EXAMPLE = "{task_id} = {benchmark_task_id} ({detail})"


@dataclass(frozen=True)
class Compared:
    """What is kept and what is not: ids in order, and one row for each other one, with its
    `level`."""

    kept: tuple[str, ...]
    removed: pl.DataFrame
    levels: tuple[Level, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Removed rows by level, every level that was tried."""
        found = self.removed["level"].to_list()
        return {level: found.count(level) for level in self.levels}


@dataclass(frozen=True)
class Decontaminated(Compared):
    """What is kept and what is not.

    `kept` and `untraced` are task_ids; those that are untraced have no graph and were compared as
    text. `removed` has the columns task_id, level, benchmark_task_id, similarity (1.0 but for
    "near") and detail.
    """

    untraced: tuple[str, ...] = ()

    def examples(self, limit: int = EXAMPLES) -> dict[str, list[dict[str, object]]]:
        """The first removed rows of each level, by task_id."""
        rows = {level: self.removed.filter(level=level).head(limit) for level in self.levels}
        return {level: found.to_dicts() for level, found in rows.items()}

    def markdown(self) -> str:
        """A report: what was removed at which level, with examples."""
        total = len(self.kept) + self.removed.height
        rows = [
            (level, str(self.counts[level]), "; ".join(map(EXAMPLE.format_map, examples)))
            for level, examples in self.examples().items()
        ]
        header = ("level", "removed", "examples (training task = benchmark task)")
        text = f"{self.removed.height} of {total} training tasks are left out.\n\n"
        text += block_markdown(Table(header, rows))
        if self.untraced:
            more = ", ..." if len(self.untraced) > EXAMPLES else ""
            text += (
                f"\n\n{len(self.untraced)} could not be run and were compared as text only, exact"
                f" and near: {', '.join(map(cell, self.untraced[:EXAMPLES]))}{more}."
            )
        return text + "\n"


def decontaminate(
    tasks: pl.DataFrame, benchmark: pl.DataFrame, config: DecontaminationConfig
) -> Decontaminated:
    """Compare `tasks` with `benchmark`, frames with `task_id`, `code` and the `graph` of their
    workloads (null where there is none).

    `kept` are the ids in order of task_id; all of them where `config.enabled` is false. Raises
    UsageError for a missing column, and where an enabled comparison has no benchmark task to
    compare with.
    """
    if not config.enabled:
        ids = tasks["task_id"].unique().sort().to_list()
        return Decontaminated(tuple(ids), removed_frame([]), config.levels)
    if benchmark.is_empty():
        raise UsageError(
            "there is no benchmark task to compare with",
            "name some with benchmark.tasks, or set decontamination.enabled=false",
        )
    return compare(fingerprints(tasks), fingerprints(benchmark), config)


def compare(
    tasks: Sequence[Fingerprint], benchmark: Iterable[Fingerprint], config: DecontaminationConfig
) -> Decontaminated:
    """`decontaminate` for existing fingerprints. Time and memory are linear in the tasks."""
    index = Index(config.levels)
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
    """The frame of `Decontaminated.removed`."""
    texts = ("task_id", "level", "benchmark_task_id", "similarity", "detail")
    schema = dict.fromkeys(texts, pl.String()) | {"similarity": pl.Float64()}
    return pl.DataFrame(rows, schema=schema, orient="row")
