"""Tables of training sets. A task whose verdicts name no operator counts as unknown."""

from __future__ import annotations

import polars as pl

from tasks.curation.tables import deciding_of
from tasks.observe.composition import composition, leading_family, markdown_table
from tasks.samples import Samples
from tasks.store import SnapshotRef
from tasks.workload.families import families_of


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


def table_of_set(strategy: str, curated: SnapshotRef, samples: Samples) -> str:
    frame = deciding_of(samples)
    taken = curated.open().read(columns=["candidate_id"])
    rows = frame.join(taken, on="candidate_id", how="semi")
    return markdown_table([composition(strategy, rows, task_families(frame))])
