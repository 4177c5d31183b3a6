"""Columns for deciding, and training rows with their texts. Deciding reads no text."""

from __future__ import annotations

import polars as pl

from tasks.curation.checks import COLUMNS, OPTIONAL
from tasks.operators import is_single_operator
from tasks.samples import Samples
from tasks.scores import known_ratio
from tasks.store.snapshot import Snapshot
from tasks.tables import CURATED, KERNEL_PROFILES, columns_of, completed

READ = (
    *(*COLUMNS, *OPTIONAL, "level", "sampling.max_tokens"),
    *("trace_flags", "rewrote_bottleneck", "correct_on_every_gpu"),
)
"""Columns of the snapshots to decide by, if they have them."""
TEXTS = ("candidate_id", "language", "reasoning", "answer", "code")
FLAG_SCHEMA = {"candidate_id": pl.String(), "trace_flags": pl.List(pl.String())}


def joined_on_candidate(verdicts: pl.DataFrame, candidates: pl.DataFrame) -> pl.DataFrame:
    """Verdicts with candidates, one row each, in the verdicts' order. Shared columns are the
    verdict's."""
    repeated = set(candidates.columns) & set(verdicts.columns) - {"candidate_id"}
    return verdicts.join(
        candidates.drop(repeated), on="candidate_id", how="inner", maintain_order="left"
    )


def deciding_of(samples: Samples, verdicts: pl.DataFrame | None = None) -> pl.DataFrame:
    """The columns to decide by, one row per candidate with a verdict; `verdicts` (columns `READ`)
    stand for the samples' own."""
    if verdicts is None:
        verdicts = samples.verdicts.open().read(columns=READ, unique="candidate_id")
    candidates = samples.candidates.open().read(columns=READ, unique="candidate_id")
    others = (samples.workloads, samples.flags, samples.profiles)
    workloads, flags, profiles = (ref.open() if ref else None for ref in others)
    frame = joined_on_candidate(verdicts, candidates)
    frame = with_profiles(with_operators(frame, workloads), profiles)
    return with_flags(frame, flags) if flags else frame


def with_profiles(frame: pl.DataFrame, profiles: Snapshot | None) -> pl.DataFrame:
    if profiles is None:
        return frame
    names = ("candidate_id", "limit", "cause", "sol_score", "rewrote_bottleneck")
    columns = {name: columns_of(KERNEL_PROFILES)[name] for name in names}
    rows = completed(profiles.read(columns=names, unique="candidate_id"), columns)
    named = rows.with_columns(bottleneck=pl.coalesce("cause", "limit")).drop("limit", "cause")
    return _joined(frame.drop("rewrote_bottleneck", strict=False), named, "candidate_id")


def with_flags(frame: pl.DataFrame, flags: pl.DataFrame | Snapshot) -> pl.DataFrame:
    """Add `trace_flags` (from rows with candidate_id and trace_flags), null where not measured."""
    if isinstance(flags, Snapshot):
        flags = flags.read(columns=list(FLAG_SCHEMA), unique="candidate_id")
    flags = completed(flags, FLAG_SCHEMA)
    return _joined(frame.drop("trace_flags", strict=False), flags, "candidate_id")


def with_operators(frame: pl.DataFrame, workloads: Snapshot | None) -> pl.DataFrame:
    """Add `operators_from`: "verdict", else "workload", whose operators replace
    `reference_operators`, else null."""
    if "reference_operators" not in frame.columns:
        if workloads is None:
            return frame  # for `curate` to refuse
        none = pl.lit(None, dtype=pl.List(pl.String))
        frame = frame.with_columns(reference_operators=none)
    seen = pl.col("reference_operators").list.len().fill_null(0) > 0
    frame = frame.with_columns(operators_from=pl.when(seen).then(pl.lit("verdict")))
    if workloads is None or frame["operators_from"].null_count() == 0:
        return frame
    executed = workloads.read(columns=["task_id", "operators"], unique="task_id")
    executed = executed.filter(pl.col("operators").list.len() > 0)
    counted = pl.when(pl.col("operators").is_not_null()).then(pl.lit("workload"))
    operators = pl.coalesce("operators", "reference_operators")
    return (
        _joined(frame, executed, "task_id")
        .with_columns(
            operators_from=pl.coalesce("operators_from", counted),
            reference_operators=pl.when(seen).then("reference_operators").otherwise(operators),
        )
        .drop("operators")
    )


def named_tasks(tasks: Snapshot) -> pl.DataFrame:
    """task_id, task_name, task_code, entry_point of a curated row's task."""
    rows = tasks.read(columns=["task_id", "name", "code", "entry_point"], unique="task_id")
    return rows.rename({"name": "task_name", "code": "task_code"})


def texts_of(candidates: Snapshot, taken: pl.DataFrame) -> pl.DataFrame:
    """`TEXTS` of the candidates in `taken`, read by part to hold only those in memory."""
    rows = candidates.rows_of(places_of(candidates, taken), TEXTS)
    return pl.DataFrame(list(rows), schema=dict.fromkeys(TEXTS, pl.String()))


def places_of(candidates: Snapshot, wanted: pl.DataFrame) -> pl.DataFrame:
    """candidate_id and place of the wanted candidates, each once."""
    places = candidates.index(["candidate_id"], unique=True)
    ids = wanted.select("candidate_id")
    return places.join(ids, on="candidate_id", how="semi", maintain_order="left")


def curated_rows(
    taken: pl.DataFrame, texts: pl.DataFrame, named: pl.DataFrame | None = None
) -> pl.DataFrame:
    """tasks.tables.CURATED of what `curate` took, in order. `texts` has candidate_id and any of
    `TEXTS`; `named` is of `named_tasks`."""
    single = is_single_operator(pl.col("reference_operators"))
    rows = completed(taken, {"reasoning_from": pl.String()}).with_columns(
        pl.col("reasoning_tokens").cast(pl.Int64),
        _giver=pl.coalesce("reasoning_from", "candidate_id"),
        speedup=known_ratio(taken, "speedup"),
        speedup_lower=known_ratio(taken, "speedup_lower"),
        operator_kind=pl.when(single).then(pl.lit("single_operator")).otherwise(pl.lit("fusion")),
    )
    own = texts.drop("reasoning", strict=False)
    rows = _joined(rows.drop(set(TEXTS) - {"candidate_id"}, strict=False), own, "candidate_id")
    if "reasoning" in texts.columns:
        rows = _joined(rows, texts.select("reasoning", _giver="candidate_id"), "_giver")
    if named is not None:
        rows = _joined(rows, named, "task_id")
    columns = columns_of(CURATED)
    return completed(rows, columns).select(list(columns)).cast(columns)


def _joined(left: pl.DataFrame, right: pl.DataFrame, on: str) -> pl.DataFrame:
    return left.join(right, on=on, how="left", maintain_order="left")
