"""Figures of verdicts and of the training sets taken from them.

Guarantees: the same frames give the same files; texts are not read. Does not guarantee a family for
a task whose verdicts name no operator (no candidate of it reached its reference): it counts as
unknown, unless `families` names one.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from kernels_eval.errors import UsageError
from tasks.analysis.composition import (
    Overlap,
    SetComposition,
    composition,
    leading_family,
    markdown,
    overlap,
    status_by_family,
)
from tasks.curation.tables import deciding_of
from tasks.files import explain_write_errors
from tasks.samples import Samples
from tasks.store import SnapshotRef
from tasks.workload.families import families_of

if TYPE_CHECKING:
    from tasks.reporting.charts import Drawn

MAX_SETS = 40  # more in one figure cannot be read
MAX_SETS_OF_OVERLAP = 16
TABLES_FILE = "composition.md"


def task_families(operators: pl.DataFrame) -> pl.DataFrame:
    """task_id and family of each task of a frame with task_id and reference_operators (or
    `operators`), by the task's first row that names any. Tasks without are left out. Raises
    UsageError for missing columns."""
    name = "operators" if "operators" in operators.columns else "reference_operators"
    if missing := [column for column in ("task_id", name) if column not in operators.columns]:
        raise UsageError(
            f"operator families need the columns {', '.join(missing)}",
            "give verdicts, or workloads of the tasks",
        )
    if not isinstance(operators.schema[name], pl.List):
        return pl.DataFrame(schema={"task_id": pl.String, "family": pl.String})
    known = operators.filter(pl.col(name).list.len() > 0)
    known = known.unique("task_id", keep="first", maintain_order=True)
    # there are far fewer lists of operators than tasks: each is looked at once
    key = pl.col(name).cast(pl.List(pl.String)).list.join("\0")
    keyed = known.select(pl.col("task_id").cast(pl.String), family=key)
    found = {
        text: leading_family(families_of(text.split("\0"))) for text in keyed["family"].unique()
    }
    family = pl.col("family").replace_strict(found, default=None, return_dtype=pl.String)
    return keyed.with_columns(family)


class Figures:
    """Figures of verdicts, and of the sets that are added one by one: only numbers and ids of a set
    are kept."""

    def __init__(self, frame: pl.DataFrame, families: pl.DataFrame | None = None) -> None:
        """`frame` has a row per verdict with task_id, status and reference_operators; `families`
        (task_id, family) goes before the latter. Raises UsageError for missing columns."""
        self.families = task_families(frame) if families is None else families
        self.statuses = status_by_family(frame, self.families)
        self.held: list[SetComposition] = []
        self._ids: dict[str, pl.Series] = {}

    def add(self, name: str, taken: pl.DataFrame) -> None:
        """A set: rows with candidate_id, task_id, reasoning_tokens, `timing` or `speedup`,
        reference_operators or operator_kind. Raises UsageError for missing columns."""
        self.held.append(composition(name, taken, self.families))
        self._ids[name] = taken["candidate_id"]

    def drawn(self) -> list[Drawn]:
        """Statuses by family; with a set its composition, with two or more their overlap (up to
        MAX_SETS_OF_OVERLAP)."""
        from tasks.analysis import composition_figures as figures

        found = [figures.status_figure(self.statuses)]
        if self.held:
            found.append(figures.composition_figure(self.held[:MAX_SETS]))
        if self.shared:
            found.append(figures.overlap_figure(self.shared))
        return found

    def write(self, directory: Path) -> tuple[Path, ...]:
        """The figures as SVG and PNG, and their numbers as tables in `composition.md`, in a
        directory that is made where it is not there. Returns the files. Raises UsageError where
        they cannot be written."""
        from tasks.reporting.charts import save

        written: list[Path] = []
        with explain_write_errors(directory, "choose another --out, or free some disk"):
            directory.mkdir(parents=True, exist_ok=True)
            for each in self.drawn():
                written += save(each, directory)
            if self.held:
                tables = directory / TABLES_FILE
                tables.write_text(markdown(self.held, self.shared), encoding="utf-8")
                written.append(tables)
        return tuple(written)

    @cached_property
    def shared(self) -> Overlap | None:
        """What the sets have in common, once all are added."""
        return overlap(self._ids) if 1 < len(self.held) <= MAX_SETS_OF_OVERLAP else None


def draw_curated(
    strategy: str,
    curated: SnapshotRef,
    samples: Samples,
) -> tuple[Path, ...]:
    """Figures of verdicts and the training set taken from them, beside its table; existing ones are
    kept. Empty where the root is remote."""
    training_set = curated.open()
    if not training_set.is_local:
        return ()
    directory = training_set.local_dir("figures")
    if not (directory / TABLES_FILE).exists():  # written last
        frame = deciding_of(samples)
        figures = Figures(frame)
        taken = training_set.read(columns=["candidate_id"])
        figures.add(strategy, frame.join(taken, on="candidate_id", how="semi"))
        figures.write(directory)
    return tuple(sorted(directory.iterdir()))
