"""The samples that every strategy chooses from, and the seeded order in which draws are made.

Guarantees: all strategies see one pool, so that they differ in their rule alone: samples with
status "correct", of the first turn, with a reasoning, each candidate once, sorted by task_id,
sample_index and candidate_id whatever the order of the rows. No Python object is made per row. Does
not guarantee that a speedup is certain: that is what `demanded` asks.

A frame holds one row per candidate with the columns of tasks.tables.VERDICTS and CANDIDATES
(`COLUMNS` are needed, `OPTIONAL` are read where the frame has them).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.records import VERDICT_SCHEMA_VERSION
from tasks.curation.config import CurationConfig
from tasks.operators import operator_kind

Array = np.ndarray[Any, Any]
COLUMNS = (
    *("candidate_id", "task_id", "status", "timing", "reference_operators"),
    *("generator", "sample_index", "reasoning_tokens"),
)
OPTIONAL = ("schema_version", "turn", "custom_kernels", "reason", "trace_flags")
TEXT = (pl.String, pl.Categorical, pl.Enum)
KINDS = {
    **dict.fromkeys(("candidate_id", "task_id", "status"), "text"),
    **dict.fromkeys(("sample_index", "reasoning_tokens", "turn", "schema_version"), "numbers"),
    **dict.fromkeys(("reference_operators", "custom_kernels", "trace_flags"), "lists"),
}
# The end of a candidate_id that a draw depends on; ids that agree there are drawn in their own
# order.
ID_BYTES = 64
FIX = "give the verdicts as verification wrote them, with the candidates as synthesis did"


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

    Raises UsageError for missing columns and columns of another kind, rows without an id, verdicts
    of different or newer schema versions, a correct sample without reasoning_tokens, and where no
    correct sample has any reasoning.
    """
    config = config or CurationConfig()
    require_columns(frame, config)
    require_one_version(frame)
    first = pl.lit(True)
    if not config.later_turns and "turn" in frame.columns:
        first = pl.col("turn").fill_null(1) == 1  # older snapshots have no turns
    # no flags and no error: there is no correct sample either
    clean = without_flags(config) if "trace_flags" in frame.columns else pl.lit(True)
    correct = (
        frame.select(name for name in (*COLUMNS, *OPTIONAL) if name in frame.columns)
        .with_row_index("_row")
        .filter(pl.col("status") == "correct", first, clean)
        .unique(subset="candidate_id", keep="first", maintain_order=True)
    )
    _require_lengths(correct)
    speedup = pl.col("_speedup")
    lower, upper = (
        pl.when(speedup > 0).then(pl.coalesce(known_ratio(frame, name), speedup)).otherwise(0.0)
        for name in ("speedup_lower", "speedup_upper")
    )
    pool = (
        correct.filter(pl.col("reasoning_tokens") > 0)
        .with_columns(_speedup=known_ratio(frame, "speedup").fill_null(0.0))
        .with_columns(_speedup_lower=lower, _speedup_upper=upper)
        .with_columns(_sure=demanded(config))
    )
    pool = with_kind(pool).drop({*COLUMNS, *OPTIONAL} - set(KEPT), strict=False)
    return pool.sort("task_id", "sample_index", "candidate_id")


KEPT = ("candidate_id", "task_id", "sample_index", "reasoning_tokens")


def demanded(config: CurationConfig) -> pl.Expr:
    """Whether a row of the pool in the making meets the strict demands. They may refuse a winner,
    and never crown another one."""
    met = pl.lit(True)
    if config.require_speedup_lower_above is not None:
        met = met & (pl.col("_speedup_lower") > config.require_speedup_lower_above)
    if config.require_custom_kernel:
        met = met & (pl.col("custom_kernels").list.len().fill_null(0) > 0)
    return met


def drawn(pool: pl.DataFrame, seed: int) -> pl.DataFrame:
    """The pool with `_draw`, a number that depends on (seed, candidate_id) alone: sorting by it
    draws without replacement, whatever other rows there are."""
    numbers = draw_numbers(pool["candidate_id"], seed)
    return pool.with_columns(_draw=pl.Series(numbers, dtype=pl.UInt64))


def draw_numbers(ids: pl.Series, seed: int) -> Array:
    """One 64-bit number per id. SplitMix64's finaliser (Steele, Lea and Flood 2014) over the id's
    last 64 bytes, eight at a time: the hashes of polars and Python may change with their versions,
    this one does not."""
    padded = ids.str.pad_start(ID_BYTES, "\0").cast(pl.Binary).bin.slice(-ID_BYTES, ID_BYTES)
    state = np.full(len(ids), _mixed(np.array([seed], dtype=np.uint64))[0], dtype=np.uint64)
    for offset in range(0, ID_BYTES, 8):
        word = padded.bin.slice(offset, 8).bin.reinterpret(dtype=pl.UInt64, endianness="little")
        state = _mixed(state ^ word.to_numpy())
    return state


def _mixed(state: Array) -> Array:
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = state ^ (state >> np.uint64(31))
    return mixed


def ratio(frame: pl.DataFrame, name: str) -> pl.Expr:
    """A field of `timing`; null where the table was written without it, or where nothing was timed
    at all."""
    there = name in _fields(frame)
    return (pl.col("timing").struct.field(name) if there else pl.lit(None)).cast(pl.Float64)


def known_ratio(frame: pl.DataFrame, name: str) -> pl.Expr:
    """`ratio`, null where it is not a finite number above 0: such a row was not timed."""
    value = ratio(frame, name)
    return pl.when(value.is_finite() & (value > 0)).then(value)


def _fields(frame: pl.DataFrame) -> dict[str, Any]:
    return {field.name: field.dtype for field in getattr(frame.schema["timing"], "fields", [])}


def without_flags(config: CurationConfig) -> pl.Expr:
    """Whether the trace of a row has none of the flags that are to be excluded."""
    if not config.exclude_flags:
        return pl.lit(True)
    excluded = pl.element().is_in(list(config.exclude_flags))
    return ~pl.col("trace_flags").list.eval(excluded).list.any()


def with_kind(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows with `_single`, from `reference_operators`: `operator_kind` is asked once for each
    different list, not for each row."""
    names = pl.col("reference_operators").cast(pl.List(pl.String))
    keyed = rows.with_columns(_operators=names.list.join("\0").fill_null(""))
    different = keyed["_operators"].unique()
    singles = [
        operator_kind(text.split("\0") if text else []) == "single_operator"
        for text in different.to_list()
    ]
    kinds = pl.DataFrame({"_operators": different, "_single": pl.Series(singles, dtype=pl.Boolean)})
    return keyed.join(kinds, on="_operators", how="left", maintain_order="left").drop("_operators")


# -- what a frame must be --------------------------------------------------------------------------


def require_columns(frame: pl.DataFrame, config: CurationConfig) -> None:
    """Raises UsageError where the columns are not there or not of the kind that the rule reads."""
    needed = [*COLUMNS, *(["custom_kernels"] if config.require_custom_kernel else [])]
    if missing := [name for name in needed if name not in frame.columns]:
        raise UsageError(
            f"curation needs the columns {', '.join(missing)}",
            "join a verification snapshot with the candidates it verified",
        )
    fields = _fields(frame)
    for name, kind in KINDS.items():
        _require_kind(f"the column {name}", frame.schema.get(name), kind)
    for name in ("candidate_id", "task_id"):
        if nulls := frame[name].null_count():
            raise UsageError(f"{nulls} of {frame.height} rows have no {name}", FIX)
    if "speedup" not in fields and frame["timing"].null_count() < frame.height:
        raise UsageError("the column timing is no struct with a field speedup", FIX)
    for name in ("speedup", "speedup_lower", "speedup_upper"):
        _require_kind(f"timing.{name}", fields.get(name), "numbers")
    if config.exclude_flags:
        _require_flags(frame)


def _require_kind(what: str, of: pl.DataType | None, kind: str) -> None:
    if of is None or of == pl.Null:
        return
    fits = {"numbers": of.is_numeric(), "lists": isinstance(of, pl.List)}
    if not fits.get(kind, isinstance(of, TEXT)):
        raise UsageError(f"{what} is {of}, not {kind}", FIX)


def _require_flags(frame: pl.DataFrame) -> None:
    """A trace that was not measured has no flag, and is not known to be without one."""
    correct = frame.filter(pl.col("status") == "correct")
    there = "trace_flags" in frame.columns
    unknown = correct["trace_flags"].null_count() if there else correct.height
    if unknown:
        raise UsageError(
            f"the reasoning of {unknown} of {correct.height} correct samples was not measured,"
            " which exclude_flags asks about",
            "give candidates with their reasoning, or leave out exclude_flags",
        )


def require_one_version(frame: pl.DataFrame) -> None:
    """Raises UsageError for verdicts of several schema versions, which mean different things by
    the same column, and of a newer one."""
    if "schema_version" not in frame.columns:
        return
    counts = dict(sorted(frame["schema_version"].drop_nulls().value_counts().iter_rows()))
    if len(counts) > 1:
        shown = ", ".join(f"version {version}: {count}" for version, count in counts.items())
        raise UsageError(
            f"the verdicts are of {len(counts)} schema versions ({shown})",
            "verify all candidates with one version of concur",
        )
    newest = max(counts, default=0)
    if newest > VERDICT_SCHEMA_VERSION:
        raise UsageError(
            f"the verdicts have schema version {newest}, this concur knows"
            f" {VERDICT_SCHEMA_VERSION}",
            "update concur",
        )


def _require_lengths(correct: pl.DataFrame) -> None:
    tokens = pl.col("reasoning_tokens")
    unknown = correct.filter(~tokens.cast(pl.Float64).is_finite().fill_null(False))
    if unknown.height:
        raise UsageError(
            f"{unknown.height} of {correct.height} correct samples of {_generators(unknown)} have"
            " no reasoning_tokens, which curation compares",
            "give that generator's tokenizer with --set synthesis.tokenizer=HUB_ID_OR_DIRECTORY and"
            " run synthesis again",
        )
    if correct.height and not (correct["reasoning_tokens"] > 0).any():
        raise UsageError(
            f"none of the {correct.height} correct samples of {_generators(correct)} has any"
            " reasoning to train on",
            "use a model that reasons, and a server that returns the text before </think>",
        )


def _generators(rows: pl.DataFrame) -> str:
    return ", ".join(sorted({str(name) for name in rows["generator"].unique().to_list()}))
