"""Table and figure of training sets. A task whose verdicts name no operator counts as unknown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from tasks.curation.tables import deciding_of
from tasks.files import explain_write_errors
from tasks.observe.composition import SetComposition, composition, leading_family, markdown_table
from tasks.samples import Samples
from tasks.store import SnapshotRef
from tasks.workload.families import families_of

MAX_SETS = 40  # more in one figure cannot be read
TABLE_FILE = "composition.md"


def task_families(verdicts: pl.DataFrame) -> pl.DataFrame:
    """task_id and family of each task of a frame with task_id and reference_operators, by its first
    row that names any."""
    operators = pl.col("reference_operators")
    if not isinstance(verdicts.schema["reference_operators"], pl.List):
        return pl.DataFrame(schema={"task_id": pl.String, "family": pl.String})
    known = verdicts.filter(operators.list.len() > 0)
    known = known.unique("task_id", keep="first", maintain_order=True)
    # there are far fewer lists of operators than tasks: each is looked at once
    joined = operators.cast(pl.List(pl.String)).list.join("\0")
    tasks = known.select(pl.col("task_id").cast(pl.String), family=joined)
    found = {
        text: leading_family(families_of(text.split("\0"))) for text in tasks["family"].unique()
    }
    family = pl.col("family").replace_strict(found, default=None, return_dtype=pl.String)
    return tasks.with_columns(family)


def write_figures(sets: Sequence[SetComposition], directory: Path) -> tuple[Path, ...]:
    """Write the sets' figure (SVG and PNG) and table (`composition.md`) into a directory. Returns
    the files. Raises UsageError where they cannot be written."""
    from tasks.observe.composition_figure import composition_figure
    from tasks.reporting.charts import save

    table = directory / TABLE_FILE
    with explain_write_errors(directory, "choose another --out, or free some disk"):
        directory.mkdir(parents=True, exist_ok=True)
        figures = save(composition_figure(sets[:MAX_SETS]), directory)
        table.write_text(markdown_table(sets), encoding="utf-8")
    return (*figures, table)


def draw_curated(strategy: str, curated: SnapshotRef, samples: Samples) -> tuple[Path, ...]:
    """Draw a training set's figure and table beside its rows, unless they exist. Empty for a remote
    root."""
    training_set = curated.open()
    if not training_set.is_local:
        return ()
    directory = training_set.local_dir("figures")
    if not (directory / TABLE_FILE).exists():  # written last
        frame = deciding_of(samples)
        taken = training_set.read(columns=["candidate_id"])
        rows = frame.join(taken, on="candidate_id", how="semi")
        write_figures([composition(strategy, rows, task_families(frame))], directory)
    return tuple(sorted(directory.iterdir()))
