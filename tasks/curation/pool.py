"""The samples that every strategy chooses from, and the seeded order in which draws are made.

Guarantees: all strategies see one pool, so that they differ in their rule alone: samples with
status "correct", of the first turn, with a reasoning, each candidate once, sorted by task_id,
sample_index and candidate_id whatever the order of the rows. No Python object is made per row. Does
not guarantee that a speedup is certain: that is what `demanded` asks.

A frame holds one row per candidate with the columns of tasks.tables.VERDICTS and CANDIDATES
(`COLUMNS` names those that are needed, `OPTIONAL` those that are read where they are there).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels_eval.errors import UsageError
from kernels_eval.records import VERDICT_SCHEMA_VERSION
from tasks.curation.config import CurationConfig
from tasks.operators import operator_kind

if TYPE_CHECKING:
    import numpy as np
    import polars as pl

COLUMNS = (
    "candidate_id",
    "task_id",
    "status",
    "timing",
    "reference_operators",
    "generator",
    "sample_index",
    "reasoning_tokens",
)
OPTIONAL = ("schema_version", "turn", "custom_kernels", "reason", "trace_flags")
KINDS = {
    **dict.fromkeys(("candidate_id", "task_id", "status"), "text"),
    **dict.fromkeys(("sample_index", "reasoning_tokens", "turn", "schema_version"), "numbers"),
    **dict.fromkeys(("reference_operators", "custom_kernels", "trace_flags"), "lists"),
}
# of a candidate_id, from its end, that a draw depends on; ids that agree there are drawn in their
# own order
ID_BYTES = 64


def eligible_samples(frame: pl.DataFrame, config: CurationConfig | None = None) -> pl.DataFrame:
    """The pool: one row per sample that may be taken, with few columns, and `_row`, its row in
    `frame`.

    `_speedup`, `_speedup_lower`, `_speedup_upper` are ratios. A sample without a finite, positive
    speedup counts as not timed: 0 in all three. One without bounds has its speedup for both.
    `_single`: is its task a single operator. `_sure`: does it meet what the configuration demands
    (`require_...`). A correct answer whose reasoning is empty (a response that lost its think tags)
    has no trace to train on, and its zero tokens would make it the shortest of its task: it is left
    out. A sample with one of `exclude_flags` is left out as if it had never been drawn: another of
    its task may be the shortest or fastest then. A candidate_id that occurs twice counts once.

    if config.exclude_flags: _require_flags(frame) Raises UsageError for missing columns and columns
    of another kind, rows without an id, verdicts of different or newer schema versions, a correct
    sample without reasoning_tokens, and where no correct sample has any reasoning.
    """
    import polars as pl

    config = config or CurationConfig()
    require_columns(frame, config)
    require_one_version(frame)
    wanted = [
        name
        for name in (*COLUMNS, "turn", "custom_kernels", "trace_flags")
        if name in frame.columns
    ]
    correct = (
        frame.lazy()
        .select(wanted)
        .with_row_index("_row")
        .filter(pl.col("status") == "correct", _turn_is_first(frame, config), without_flags(config))
        .unique(subset="candidate_id", keep="first", maintain_order=True)
        .collect()
    )
    _require_lengths(correct)
    speedup = ratio(frame, "speedup")
    pool = (
        correct.lazy()
        .filter(pl.col("reasoning_tokens") > 0)
        .with_columns(
            pl.when(speedup.is_finite() & (speedup > 0))
            .then(speedup)
            .otherwise(0.0)
            .fill_null(0.0)
            .alias("_speedup")
        )
        .with_columns(
            _bound(ratio(frame, "speedup_lower")).alias("_speedup_lower"),
            _bound(ratio(frame, "speedup_upper")).alias("_speedup_upper"),
        )
        .with_columns(demanded(config).alias("_sure"))
        .drop(
            "status", "timing", "generator", "turn", "custom_kernels", "trace_flags", strict=False
        )
        .collect()
    )
    return (
        with_kind(pool).drop("reference_operators").sort("task_id", "sample_index", "candidate_id")
    )


def demanded(config: CurationConfig) -> pl.Expr:
    """Does a row of the pool in the making meet the strict demands? They may refuse a winner, and
    never crown another one."""
    import polars as pl

    met = pl.lit(True)
    if config.require_speedup_lower_above is not None:
        met = met & (pl.col("_speedup_lower") > config.require_speedup_lower_above)
    if config.require_custom_kernel:
        met = met & (pl.col("custom_kernels").list.len().fill_null(0) > 0)
    return met


def drawn(pool: pl.DataFrame, seed: int) -> pl.DataFrame:
    """The pool with `_draw`, a number that depends on (seed, candidate_id) alone: sorting by it
    draws without replacement, whatever other rows there are."""
    import polars as pl

    return pool.with_columns(
        pl.Series("_draw", draw_numbers(pool["candidate_id"], seed), dtype=pl.UInt64)
    )


def draw_numbers(ids: pl.Series, seed: int) -> np.ndarray:
    """One 64-bit number per id. SplitMix64's finaliser (Steele, Lea and Flood 2014) over the id's
    last 64 bytes, eight at a time: the hashes of polars and Python may change with their versions,
    this one does not."""
    import numpy as np
    import polars as pl

    padded = ids.str.pad_start(ID_BYTES, "\0").cast(pl.Binary).bin.slice(-ID_BYTES, ID_BYTES)
    state = np.full(len(ids), _mixed(np.array([seed], dtype=np.uint64))[0], dtype=np.uint64)
    for offset in range(0, ID_BYTES, 8):
        word = (
            padded.bin.slice(offset, 8)
            .bin.reinterpret(dtype=pl.UInt64, endianness="little")
            .to_numpy()
        )
        state = _mixed(state ^ word)
    return state


def _mixed(state: np.ndarray) -> np.ndarray:
    import numpy as np

    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def ratio(frame: pl.DataFrame, name: str) -> pl.Expr:
    """A field of `timing`; null where the table was written without it, or where nothing was timed
    at all."""
    import polars as pl

    there = name in {field.name for field in getattr(frame.schema["timing"], "fields", [])}
    return (pl.col("timing").struct.field(name) if there else pl.lit(None)).cast(pl.Float64)


def _bound(bound: pl.Expr) -> pl.Expr:
    import polars as pl

    usable = (
        pl.when(bound.is_finite() & (bound > 0))
        .then(bound)
        .otherwise(pl.col("_speedup"))
        .fill_null(pl.col("_speedup"))
    )
    return pl.when(pl.col("_speedup") > 0).then(usable).otherwise(0.0)


def _turn_is_first(frame: pl.DataFrame, config: CurationConfig) -> pl.Expr:
    import polars as pl

    if config.later_turns or "turn" not in frame.columns:
        return pl.lit(True)
    return pl.col("turn").fill_null(1) == 1  # older snapshots have no turns


def without_flags(config: CurationConfig) -> pl.Expr:
    """Has the trace of a row none of the flags that are to be excluded?"""
    import polars as pl

    if not config.exclude_flags:
        return pl.lit(True)
    return (
        ~pl.col("trace_flags").list.eval(pl.element().is_in(list(config.exclude_flags))).list.any()
    )


def with_kind(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows with `_single`, from `reference_operators`: `operator_kind` is asked once for each
    different list, not for each row."""
    import polars as pl

    names = pl.col("reference_operators").cast(pl.List(pl.String))
    keyed = rows.with_columns(names.list.join("\0").fill_null("").alias("_operators"))
    different = keyed["_operators"].unique()
    kinds = [
        operator_kind(names.split("\0") if names else []) == "single_operator"
        for names in different.to_list()
    ]
    table = pl.DataFrame({"_operators": different, "_single": pl.Series(kinds, dtype=pl.Boolean)})
    return keyed.join(table, on="_operators", how="left", maintain_order="left").drop("_operators")


def require_columns(frame: pl.DataFrame, config: CurationConfig) -> None:
    """Are the columns there and of the kind that the rule reads. Raises UsageError where not."""
    import polars as pl

    needed = [*COLUMNS, *(["custom_kernels"] if config.require_custom_kernel else [])]
    if missing := [name for name in needed if name not in frame.columns]:
        raise UsageError(
            f"curation needs the columns {', '.join(missing)}",
            "join a verification snapshot with the candidates it verified",
        )
    fix = "give the verdicts as verification wrote them, with the candidates as synthesis did"
    for name, kind in KINDS.items():
        if (of := frame.schema.get(name, pl.Null())) != pl.Null and not _is_of(of, kind):
            raise UsageError(f"the column {name} is {of}, not {kind}", fix)
    for name in ("candidate_id", "task_id"):
        if frame[name].has_nulls():
            raise UsageError(
                f"{frame[name].null_count()} of {frame.height} rows have no {name}", fix
            )
    fields = {field.name: field.dtype for field in getattr(frame.schema["timing"], "fields", [])}
    if "speedup" not in fields and frame["timing"].null_count() < frame.height:
        raise UsageError("the column timing is no struct with a field speedup", fix)
    for name in ("speedup", "speedup_lower", "speedup_upper"):
        if (of := fields.get(name, pl.Null())) != pl.Null and not of.is_numeric():
            raise UsageError(f"timing.{name} is {of}, not numbers", fix)
    if config.exclude_flags:
        _require_flags(frame)


def _is_of(of: pl.DataType, kind: str) -> bool:
    import polars as pl

    if kind == "numbers":
        return of.is_numeric()
    return isinstance(of, pl.List if kind == "lists" else pl.String | pl.Categorical | pl.Enum)


def _require_flags(frame: pl.DataFrame) -> None:
    """A trace that nobody measured has no flag, and is not known to be without one."""
    import polars as pl

    correct = frame.filter(pl.col("status") == "correct")
    unknown = (
        correct.height
        if "trace_flags" not in frame.columns
        else correct["trace_flags"].null_count()
    )
    if unknown:
        raise UsageError(
            f"the reasoning of {unknown} of {correct.height} correct samples was not measured,"
            " which exclude_flags asks about",
            "give candidates with their reasoning, or leave out exclude_flags",
        )


def require_one_version(frame: pl.DataFrame) -> None:
    """Verdicts of several schema versions mean different things by the same column."""
    if "schema_version" not in frame.columns:
        return
    counts = dict(sorted(frame["schema_version"].drop_nulls().value_counts().iter_rows()))
    if len(counts) > 1:
        shown = ", ".join(f"version {version}: {count}" for version, count in counts.items())
        raise UsageError(
            f"the verdicts are of {len(counts)} schema versions ({shown})",
            "verify all candidates with one version of concur",
        )
    if counts and (newest := max(counts)) > VERDICT_SCHEMA_VERSION:
        raise UsageError(
            f"the verdicts have schema version {newest}, this concur knows"
            f" {VERDICT_SCHEMA_VERSION}",
            "update concur",
        )


def _require_lengths(correct: pl.DataFrame) -> None:
    import polars as pl

    unknown = correct.filter(
        ~pl.col("reasoning_tokens").cast(pl.Float64).is_finite().fill_null(False)
    )
    if unknown.is_empty():
        if correct.height and not (correct["reasoning_tokens"] > 0).any():
            raise UsageError(
                f"none of the {correct.height} correct samples of {_generators(correct)} has any"
                " reasoning to train on",
                "use a model that reasons, and a server that returns the text before </think>",
            )
        return
    raise UsageError(
        f"{unknown.height} of {correct.height} correct samples of {_generators(unknown)} have no"
        " reasoning_tokens, which curation compares",
        "give that generator's tokenizer with --set synthesis.tokenizer=HUB_ID_OR_DIRECTORY and run"
        " synthesis again",
    )


def _generators(rows: pl.DataFrame) -> str:
    return ", ".join(sorted({str(name) for name in rows["generator"].unique().to_list()}))
