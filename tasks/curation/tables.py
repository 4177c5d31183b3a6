"""Tables around the rule: the few columns it decides by, and the rows of a training set with their
texts.

Guarantees: deciding reads no text, so that memory follows the number of rows and not what models
wrote; a column that older snapshots lack is null. Does not guarantee that texts are there:
`curated_rows` leaves null what it was not given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.curation.pool import COLUMNS, OPTIONAL, ratio, with_kind
from tasks.store.snapshot import Snapshot
from tasks.tables import CURATED

if TYPE_CHECKING:
    import polars as pl

DECIDING = (*COLUMNS, *OPTIONAL)
TEXTS = ("candidate_id", "language", "reasoning", "answer", "code")


def joined_on_candidate(verdicts: pl.DataFrame, candidates: pl.DataFrame) -> pl.DataFrame:
    """Verdicts with their candidates, one row a candidate, in the order of the verdicts. What both
    have is the verdict's."""
    repeated = [
        name for name in candidates.columns if name in verdicts.columns and name != "candidate_id"
    ]
    return verdicts.join(
        candidates.drop(repeated), on="candidate_id", how="inner", maintain_order="left"
    )


def deciding(
    verdicts: Snapshot,
    candidates: Snapshot,
    workloads: Snapshot | None = None,
    flags: Snapshot | None = None,
) -> pl.DataFrame:
    """The frame that `curate` reads, of snapshots: `DECIDING` as far as it is there, without any
    text."""
    left, right = (
        snapshot.read(columns=DECIDING, unique="candidate_id")
        for snapshot in (verdicts, candidates)
    )
    frame = with_operators(joined_on_candidate(left, right), workloads)
    return (
        frame
        if flags is None
        else with_flags(
            frame, flags.read(columns=["candidate_id", "trace_flags"], unique="candidate_id")
        )
    )


def with_flags(frame: pl.DataFrame, flags: pl.DataFrame) -> pl.DataFrame:
    """The frame with `trace_flags` (candidate_id, trace_flags); null where a candidate's trace was
    not measured."""
    import polars as pl

    if "trace_flags" not in flags.columns:  # of no candidate at all
        flags = pl.DataFrame(schema={"candidate_id": pl.String, "trace_flags": pl.List(pl.String)})
    return frame.drop("trace_flags", strict=False).join(
        flags, on="candidate_id", how="left", maintain_order="left"
    )


def with_operators(frame: pl.DataFrame, workloads: Snapshot | None) -> pl.DataFrame:
    """The frame with `operators_from`: where the operators of a row's task are known from.

    "verdict": those that verification saw the reference execute, on its device and its real inputs.
    "workload": where a verdict names none, those that were executed to count the task's work, on
    meta tensors; they take the place of `reference_operators`. Else null.
    """
    import polars as pl

    if "reference_operators" not in frame.columns:
        if workloads is None:
            return frame  # for `curate` to refuse
        frame = frame.with_columns(
            pl.lit(None, dtype=pl.List(pl.String)).alias("reference_operators")
        )
    seen = pl.col("reference_operators").list.len().fill_null(0) > 0
    frame = frame.with_columns(pl.when(seen).then(pl.lit("verdict")).alias("operators_from"))
    if workloads is None or frame["operators_from"].null_count() == 0:
        return frame
    executed = workloads.read(columns=["task_id", "operators"], unique="task_id").filter(
        pl.col("operators").list.len() > 0
    )
    frame = frame.join(
        executed.rename({"operators": "_executed"}), on="task_id", how="left", maintain_order="left"
    )
    return frame.with_columns(
        pl.coalesce(
            "operators_from", pl.when(pl.col("_executed").is_not_null()).then(pl.lit("workload"))
        ),
        pl.when(seen)
        .then("reference_operators")
        .otherwise(pl.coalesce("_executed", "reference_operators")),
    ).drop("_executed")


def texts_of(candidates: Snapshot, taken: pl.DataFrame) -> pl.DataFrame:
    """`TEXTS` of the candidates in `taken`, read part by part: takes the memory of the training
    set, not of the snapshot."""
    import polars as pl

    places = candidates.index(["candidate_id"]).unique(
        "candidate_id", keep="first", maintain_order=True
    )
    found = candidates.rows_of(
        places.join(
            taken.select("candidate_id"), on="candidate_id", how="semi", maintain_order="left"
        ),
        TEXTS,
    )
    return pl.DataFrame(list(found), schema=dict.fromkeys(TEXTS, pl.String))


def curated_rows(
    taken: pl.DataFrame, texts: pl.DataFrame, named: pl.DataFrame | None = None
) -> pl.DataFrame:
    """tasks.tables.CURATED of what `curate` took, in its order.

    `texts` has candidate_id and any of `TEXTS`; `named` task_id, task_name, task_code, entry_point.
    A moved reasoning is taken from the candidate it was moved from.
    """
    import polars as pl

    giver = (
        pl.col("reasoning_from")
        if "reasoning_from" in taken.columns
        else pl.lit(None, dtype=pl.String)
    )
    rows = with_kind(taken).with_columns(giver.alias("reasoning_from"))
    rows = rows.with_columns(
        pl.coalesce("reasoning_from", "candidate_id").alias("_giver"),
        _known(ratio(taken, "speedup")).alias("speedup"),
        _known(ratio(taken, "speedup_lower")).alias("speedup_lower"),
        pl.col("reasoning_tokens").cast(pl.Int64),
        pl.when("_single")
        .then(pl.lit("single_operator"))
        .otherwise(pl.lit("fusion"))
        .alias("operator_kind"),
    ).drop([name for name in TEXTS if name in rows.columns and name != "candidate_id"])
    own = texts.drop("reasoning", strict=False)
    rows = rows.join(own, on="candidate_id", how="left", maintain_order="left")
    if "reasoning" in texts.columns:
        given = texts.select(pl.col("candidate_id").alias("_giver"), "reasoning")
        rows = rows.join(given, on="_giver", how="left", maintain_order="left")
    if named is not None:
        rows = rows.join(named, on="task_id", how="left", maintain_order="left")
    empty = pl.from_arrow(CURATED.empty_table())
    return pl.concat([empty, rows], how="diagonal_relaxed").select(CURATED.names)  # type: ignore[list-item]


def _known(speedup: pl.Expr) -> pl.Expr:
    """Null where there is no speedup: what is not above 0 or no number counts as not timed, here as
    in the pool."""
    import polars as pl

    return pl.when(speedup.is_finite() & (speedup > 0)).then(speedup)
