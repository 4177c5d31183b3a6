"""Training tasks that the benchmark knows are left out: which, at what level, and for which
benchmark task.

Guarantees: the result depends on the two sets of tasks alone, not on the order of their rows; a
removed task is reported at the first level that finds it (exact, normalised, shapes, operators,
near) with the smallest benchmark task_id that it equals there; code is never run. Does not
guarantee that what is kept is unknown to the benchmark: docs/explanation/decontamination.md says
what each level misses.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field

from kernels_eval.errors import UsageError
from tasks.decontamination.fingerprints import (
    LEVELS,
    Fingerprint,
    Level,
    Matching,
    NearIndex,
    fingerprints,
)
from tasks.sources.config import TasksConfig

if TYPE_CHECKING:
    import polars as pl


COLUMNS = ("task_id", "code")
EXAMPLES = 3
SHOWN_OPERATORS = 12


class DecontaminationConfig(Matching):
    """What counts as known to the benchmark. Defaults are measured:
    benchmarks/results/2026-11-21-decontamination.md."""

    enabled: bool = Field(
        default=True, description="leave out training tasks that the benchmark knows"
    )
    against: TasksConfig | None = Field(
        default=None,
        description=(
            "the tasks to compare with; null: those of benchmark.tasks, all of their levels"
        ),
    )
    levels: tuple[Level, ...] = Field(
        default=LEVELS,
        min_length=1,
        description="comparisons, always tried in the order of this default",
    )


@dataclass(frozen=True)
class Decontaminated:
    """What is kept and what is not. `removed`: task_id, level, benchmark_task_id, similarity (1.0
    but for "near"), detail."""

    kept: tuple[str, ...]
    removed: pl.DataFrame
    unparsed: tuple[str, ...]
    levels: tuple[Level, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Removed tasks by level, every level that was tried."""
        found = dict(self.removed["level"].value_counts().iter_rows())
        return {level: found.get(level, 0) for level in self.levels}

    def examples(self, limit: int = EXAMPLES) -> dict[str, list[dict[str, object]]]:
        """The first removed rows of each level, by task_id."""
        rows = self.removed.iter_rows(named=True)
        out: dict[str, list[dict[str, object]]] = {level: [] for level in self.levels}
        for row in rows:
            if len(out[row["level"]]) < limit:
                out[row["level"]].append(row)
        return out

    def markdown(self) -> str:
        """A report: what was removed at which level, with examples."""
        total = len(self.kept) + self.removed.height
        lines = [f"{self.removed.height} of {total} training tasks are left out.", ""]
        lines += [
            "| level | removed | examples (training task = benchmark task) |",
            "| --- | ---: | --- |",
        ]
        for level, rows in self.examples().items():
            shown = "; ".join(
                f"{_plain(row['task_id'])} = {_plain(row['benchmark_task_id'])}"
                f" ({_plain(row['detail'])})"
                for row in rows
            )
            lines.append(f"| {level} | {self.counts[level]} | {shown} |")
        if self.unparsed:
            named = ", ".join(map(_plain, self.unparsed[:EXAMPLES])) + (
                ", ..." if len(self.unparsed) > EXAMPLES else ""
            )
            lines += [
                "",
                (
                    f"{len(self.unparsed)} do not parse and were compared as text only, exact and"
                    f" near: {named}."
                ),
            ]
        return "\n".join(lines) + "\n"


def _plain(name: object) -> str:
    """A name that somebody else gave, as text in a Markdown table: it is shown in user interfaces
    and on published cards."""
    line = "".join(
        character if character.isprintable() else "?" for character in " ".join(str(name).split())
    )
    escaped = re.sub(r"([\\`*_{}\[\]()#|~!])", r"\\\1", html.escape(line, quote=False))
    return escaped.replace("://", ":\\/\\/")


def decontaminate(
    tasks: pl.DataFrame, benchmark: pl.DataFrame, config: DecontaminationConfig
) -> Decontaminated:
    """Compare `tasks` with `benchmark`, frames with `task_id`, `code` and, where there is one,
    `entry_point`.

    `kept` are the ids in order of task_id; all of them where `config.enabled` is false. Raises
    UsageError for a missing column, and where an enabled comparison has no benchmark task to
    compare with.
    """
    _require(tasks, "training tasks")
    if not config.enabled:
        ids = tasks["task_id"].unique().sort().to_list()
        return Decontaminated(tuple(ids), removed_frame([]), (), config.levels)
    _require(benchmark, "benchmark tasks")
    if benchmark.is_empty():
        raise UsageError(
            "there is no benchmark task to compare with",
            "set decontamination.against, or decontamination.enabled=false",
        )
    return compare(fingerprints(tasks), fingerprints(benchmark), config)


def compare(
    tasks: Sequence[Fingerprint], benchmark: Iterable[Fingerprint], config: DecontaminationConfig
) -> Decontaminated:
    """`decontaminate` for fingerprints that are there already. Time and memory are linear in the
    tasks."""
    index = Index(config.levels, config.min_operators, NearIndex(config))
    for task in sorted(benchmark, key=lambda task: task.task_id):
        index.add(task)
    kept, removed, unparsed = [], [], []
    for task in sorted(tasks, key=lambda task: task.task_id):
        found = index.find(task)
        if found:
            removed.append((task.task_id, *found))
        else:
            kept.append(task.task_id)
        if not task.canonical.parsed:
            unparsed.append(task.task_id)
    return Decontaminated(tuple(kept), removed_frame(removed), tuple(unparsed), index.levels)


class Index:
    """Tasks by their key at each level: the first one added with a key is the one that is found."""

    def __init__(self, levels: Sequence[Level], min_operators: int, near: NearIndex) -> None:
        self.levels = tuple(level for level in LEVELS if level in levels)
        self.min_operators = min_operators
        self._near = near
        self._keys: dict[Level, dict[str, str]] = {
            level: {} for level in self.levels if level != "near"
        }

    def add(self, task: Fingerprint) -> None:
        for level, known in self._keys.items():
            key = task.key(level, self.min_operators)
            if key is not None:
                known.setdefault(key, task.task_id)
        if "near" in self.levels:
            self._near.add(task)

    def find(self, task: Fingerprint) -> tuple[Level, str, float, str] | None:
        """(level, task_id of the equal, similarity, detail) at the first level that finds one."""
        for level, known in self._keys.items():
            key = task.key(level, self.min_operators)
            if key is not None and key in known:
                return level, known[key], 1.0, self._detail(task, level)
        near = self._near.find(task) if "near" in self.levels else None
        return ("near", near[0], near[1], f"Jaccard similarity {near[1]:.2f}") if near else None

    def _detail(self, task: Fingerprint, level: Level) -> str:
        if level != "operators":
            return {
                "exact": "same text",
                "normalised": "same program",
                "shapes": "same program but for its numbers",
            }[level]
        shown = " ".join(task.operators[:SHOWN_OPERATORS]) + (
            " ..." if len(task.operators) > SHOWN_OPERATORS else ""
        )
        return shown if len(task.operators) >= self.min_operators else f"{shown}, same input sizes"


def removed_frame(rows: list[tuple]) -> pl.DataFrame:
    """The frame of `Decontaminated.removed`."""
    import polars as pl

    schema = {
        "task_id": pl.String,
        "level": pl.String,
        "benchmark_task_id": pl.String,
        "similarity": pl.Float64,
        "detail": pl.String,
    }
    return pl.DataFrame(rows, schema=schema, orient="row")


def _require(frame: pl.DataFrame, what: str) -> None:
    missing = [name for name in COLUMNS if name not in frame.columns]
    if missing:
        raise UsageError(
            f"the {what} have no column {', '.join(missing)}",
            "give a tasks snapshot: task_id, code, entry_point",
        )
