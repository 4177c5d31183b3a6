"""Equal kernels of a task, so that no program is taken twice. Kernels with different texts may do
the same."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from tasks.curation.config import CurationConfig
from tasks.curation.pool import eligible_samples
from tasks.curation.strategies import choose
from tasks.curation.tables import places_of
from tasks.store.snapshot import Snapshot

EqualKernels = Callable[[pl.DataFrame], pl.DataFrame]
"""Of rows (candidate_id, task_id, code) those that equal another of their task: `id`, and `equals`,
the candidate_id that stands for it."""
CODE = ("candidate_id", "task_id", "code")


def same_text(rows: pl.DataFrame) -> pl.DataFrame:
    """Kernels with the text of another of their task, apart from outer white space."""
    first = pl.col("candidate_id").min().over("task_id", pl.col("code").str.strip_chars())
    found = rows.drop_nulls("code").select(id="candidate_id", equals=first)
    return found.filter(pl.col("id") != pl.col("equals"))


def with_kernels(
    frame: pl.DataFrame, config: CurationConfig, candidates: Snapshot, equal: EqualKernels | None
) -> pl.DataFrame:
    """The frame with `kernel`: the candidate_id that stands for a compared sample's kernel, else
    null. Raises UsageError as `curate` does."""
    frame = frame.with_columns(kernel=pl.lit(None, pl.String))
    if equal is None or not candidates.has_column("code"):
        return frame
    names = pl.col("candidate_id").cast(pl.String)
    paper = config.model_copy(update={"strategy": "concur", "size": None})
    while True:
        pool = eligible_samples(frame, config)
        several = pl.concat(
            choose(pool, rule)
            .taken.filter(pl.len().over("task_id") > 1)
            .select("candidate_id", "_row")
            for rule in (paper, config)
        ).unique("_row")
        compared = frame["kernel"].is_not_null()
        if several.is_empty() or compared.gather(several["_row"]).all():
            return frame
        wanted = pl.concat([frame.filter(compared)["candidate_id"], several["candidate_id"]])
        places = places_of(candidates, wanted.unique().to_frame())
        rows = pl.DataFrame(list(candidates.rows_of(places, CODE)), dict.fromkeys(CODE, pl.String))
        stand = dict(equal(rows).select("id", "equals").iter_rows())
        own = pl.when(names.is_in(wanted.cast(pl.String).implode())).then(names)
        frame = frame.with_columns(kernel=own.replace(stand))
