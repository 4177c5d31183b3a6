"""Figures of verdicts and of the training sets taken from them, for `concur curate --out` and for
whoever has the frames.

Guarantees: the same frames give the same files; texts are not read. Does not guarantee a family for
a task whose verdicts name no operator (no candidate of it reached its reference): it counts as
unknown, unless `families` says it.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kernels_eval.errors import UsageError

if TYPE_CHECKING:
    import polars as pl

    from flows.refresh import Refreshed
    from tasks.analysis.composition import Overlap
    from tasks.reporting.charts import Drawn

MOST_SETS = 40  # of an ablation more would be a figure that nobody reads
MOST_SETS_OF_OVERLAP = 16
TABLES_FILE = "composition.md"


def task_families(operators: pl.DataFrame) -> pl.DataFrame:
    """task_id and family of each task of a frame with task_id and reference_operators (or
    `operators`), by the task's first row that names any. Tasks without are left out. Raises
    UsageError for missing columns."""
    import polars as pl

    from tasks.analysis.composition import leading_family
    from tasks.workload.families import families_of

    name = "operators" if "operators" in operators.columns else "reference_operators"
    if missing := [column for column in ("task_id", name) if column not in operators.columns]:
        raise UsageError(
            f"operator families need the columns {', '.join(missing)}",
            "give verdicts, or workloads of the tasks",
        )
    if not isinstance(operators.schema[name], pl.List):
        return pl.DataFrame(schema={"task_id": pl.String, "family": pl.String})
    known = operators.select(pl.col("task_id").cast(pl.String), pl.col(name).alias("operators"))
    first = known.filter(pl.col("operators").list.len() > 0).unique(
        "task_id", keep="first", maintain_order=True
    )
    # there are far fewer lists of operators than tasks: each is looked at once
    keyed = first.select(
        "task_id", pl.col("operators").cast(pl.List(pl.String)).list.join("\0").alias("key")
    )
    keys = keyed["key"].unique()
    found = pl.Series(
        "family",
        [leading_family(families_of(key.split("\0"))) for key in keys.to_list()],
        dtype=pl.String,
    )
    return keyed.join(
        pl.DataFrame([keys, found]), on="key", how="left", maintain_order="left"
    ).select("task_id", "family")


class Figures:
    """Figures of verdicts, and of the sets that are added one by one: only numbers and ids of a set
    are kept."""

    def __init__(self, frame: pl.DataFrame, families: pl.DataFrame | None = None) -> None:
        """`frame` has a row a verdict with task_id, status and reference_operators; `families`
        (task_id, family) goes before the latter. Raises UsageError for missing columns."""
        from tasks.analysis.composition import SetComposition, status_by_family

        self.families = task_families(frame) if families is None else families
        self.statuses = status_by_family(frame, self.families)
        self.held: list[SetComposition] = []
        self._ids: dict[str, pl.Series] = {}

    def add(self, name: str, taken: pl.DataFrame) -> None:
        """A set: rows with candidate_id, task_id, reasoning_tokens, `timing` or `speedup`,
        reference_operators or operator_kind. Raises UsageError for missing columns."""
        from tasks.analysis.composition import composition

        self.held.append(composition(name, taken, self.families))
        self._ids[name] = taken["candidate_id"]

    def drawn(self) -> list[Drawn]:
        """Statuses by family; with a set its composition, with two or more their overlap (up to
        MOST_SETS_OF_OVERLAP)."""
        from tasks.analysis.composition_figures import (
            composition_figure,
            overlap_figure,
            status_figure,
        )

        found, shared = [status_figure(self.statuses)], self.shared
        if self.held:
            found.append(composition_figure(self.held[:MOST_SETS]))
        return [*found, overlap_figure(shared)] if shared else found

    def write(self, directory: Path) -> tuple[Path, ...]:
        """The figures as SVG and PNG, and their numbers as tables in `composition.md`, in a
        directory that is made where it is not there. Returns the files. Raises UsageError where
        they cannot be written."""
        from tasks.analysis.composition import markdown
        from tasks.reporting.charts import save

        written: list[Path] = []
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for each in self.drawn():
                written += save(each, directory)
            if self.held:
                (directory / TABLES_FILE).write_text(
                    markdown(self.held, self.shared), encoding="utf-8"
                )
                written.append(directory / TABLES_FILE)
        except OSError as error:
            raise UsageError(
                f"cannot write {directory}: {error.strerror or error}",
                "choose another --out, or free some disk",
            ) from error
        return tuple(written)

    @cached_property
    def shared(self) -> Overlap | None:
        """What the sets have in common, once all are added."""
        from tasks.analysis.composition import overlap

        return overlap(self._ids) if 1 < len(self.held) <= MOST_SETS_OF_OVERLAP else None


def draw_curated(refreshed: Refreshed, strategy: str) -> tuple[Path, ...]:
    """Figures of a refresh's verdicts and training set, beside its table; those that are there are
    kept. None where the root is remote."""
    from tasks.curation.tables import deciding

    curated = refreshed.curated.open()
    if not curated.is_local:
        return ()
    directory = curated.local_dir("figures")
    if not (directory / TABLES_FILE).exists():  # written last
        others = (ref.open() if ref else None for ref in (refreshed.workloads, refreshed.flags))
        frame = deciding(refreshed.verdicts.open(), refreshed.candidates.open(), *others)
        figures = Figures(frame)
        figures.add(
            strategy,
            frame.join(curated.read(columns=["candidate_id"]), on="candidate_id", how="semi"),
        )
        figures.write(directory)
    return tuple(sorted(directory.iterdir()))
