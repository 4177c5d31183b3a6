"""The samples that every strategy chooses from, and the seeded order in which draws are made.

Guarantees: all strategies see one pool, so that they differ in their rule alone: samples with
status "correct", of the first turn, with a reasoning, each candidate once, sorted by task_id,
sample_index and candidate_id whatever the order of the rows. No Python object is made per row. Does
not guarantee that a speedup is certain: that is what `demanded` asks.

A frame holds one row per candidate with the columns of tasks.tables.VERDICTS and CANDIDATES
(`COLUMNS` are needed, `OPTIONAL` are read where the frame has them).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.records import VERDICT_SCHEMA_VERSION, Json
from tasks.curation.config import CurationConfig
from tasks.operators import is_single_operator
from tasks.tables import CORRECT

Array = np.ndarray[Any, Any]
COLUMNS = (
    *("candidate_id", "task_id", "status", "timing", "reference_operators"),
    *("generator", "sample_index", "reasoning_tokens"),
)
OPTIONAL = (
    *("schema_version", "turn", "custom_kernels", "reason", "trace_flags", "kernel"),
    *("finish_reason", "finish_guessed", "completion_tokens", "max_tokens"),
    *("rewrote_bottleneck", "correct_on_every_gpu"),
)
TEXT = (pl.String, pl.Categorical, pl.Enum)
KINDS = {
    **dict.fromkeys(("candidate_id", "task_id", "status"), "text"),
    **dict.fromkeys(("sample_index", "reasoning_tokens", "turn", "schema_version"), "numbers"),
    **dict.fromkeys(("reference_operators", "custom_kernels", "trace_flags"), "lists"),
    **dict.fromkeys(("timing.speedup", "timing.speedup_lower", "timing.speedup_upper"), "numbers"),
}
Problem = tuple[str, str]
"""What is wrong with a frame, and the fix."""
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
    its task may be the shortest or fastest then; the same holds for an answer that the token limit
    cut off (`ends`). `_kernel` is the same for equal kernels of a task (the frame's `kernel`, where
    it is known). `_rivals`: the samples of its task in the pool. A candidate_id that occurs twice
    counts once.

    Raises UsageError for missing columns and columns of another kind, rows without an id, verdicts
    of different or newer schema versions, a correct sample without reasoning_tokens, and where no
    correct sample has any reasoning.
    """
    config = config or CurationConfig()
    _refuse(next(_problems(frame, config), None))
    first = pl.lit(True)
    if not config.later_turns and "turn" in frame.columns:
        first = pl.col("turn").fill_null(1) == 1  # older snapshots have no turns
    # no flags and no error: there is no correct sample either
    clean = without_flags(config) if "trace_flags" in frame.columns else pl.lit(True)
    if "correct_on_every_gpu" not in frame.columns:  # verdicts of one GPU
        frame = frame.with_columns(correct_on_every_gpu=pl.lit(True))
    kernel = pl.col("kernel") if "kernel" in frame.columns else pl.lit(None, pl.String)
    whole = pl.lit(True) if config.cut_off_answers else ~pl.col("_ends").is_in(CUT_OFF)
    correct = (
        frame.select(name for name in (*COLUMNS, *OPTIONAL) if name in frame.columns)
        .with_columns(_ends=ends(frame))
        .with_row_index("_row")
        .filter(CORRECT, first, clean, whole)
        .unique(subset="candidate_id", keep="first", maintain_order=True)
    )
    _refuse(_unusable_lengths(correct))
    speedup = pl.col("_speedup")
    bounds = {
        f"_{name}": pl.when(speedup > 0).then(pl.coalesce(known_ratio(frame, name), speedup))
        for name in ("speedup_lower", "speedup_upper")
    }
    return (
        correct.filter(pl.col("reasoning_tokens") > 0)
        .with_columns(_speedup=known_ratio(frame, "speedup").fill_null(0.0))
        .with_columns(**{name: bound.otherwise(0.0) for name, bound in bounds.items()})
        .select(
            *("_row", "candidate_id", "task_id", "sample_index", "reasoning_tokens"),
            *("_speedup", "_speedup_lower", "_speedup_upper"),
            _sure=demanded(config),
            _single=is_single_operator(pl.col("reference_operators")),
            _kernel=pl.coalesce(kernel, pl.col("candidate_id").cast(pl.String)),
            _rivals=pl.len().over("task_id"),
        )
        .sort("task_id", "sample_index", "candidate_id")
    )


CUT_OFF = ("cut off (recorded)", "cut off (guessed from the text)", "cut off (guessed from tokens)")


CUT_REASONS = ("length", "max_tokens", "max_length")
ENDED_REASONS = ("stop", "eos", "eos_token", "end_turn", "stop_sequence")
"""Finish reasons as servers name them, in small letters."""


def ends(frame: pl.DataFrame) -> pl.Series:
    """Why each answer ended: one of `CUT_OFF`, "by itself", or "unknown".

    Where no finish_reason is known (or it is none of `CUT_REASONS` and `ENDED_REASONS`), an answer
    of exactly max_tokens was cut off, and so was one as long as its generator's longest where
    answers to several tasks have that length. Any other is unknown.
    """
    given = ("finish_reason", "finish_guessed", "completion_tokens", "max_tokens")
    known = frame.with_columns(pl.lit(None).alias(n) for n in given if n not in frame.columns)
    reason = pl.col("finish_reason").cast(pl.String).str.to_lowercase()
    tokens = pl.col("completion_tokens")
    longest = tokens == tokens.max().over("generator")
    shared = longest & (pl.col("task_id").n_unique().over("generator", tokens) > 1)
    guessed = pl.col("finish_guessed").cast(pl.Boolean).fill_null(False)
    return known.select(
        _ends=pl.when(reason.is_in(CUT_REASONS))
        .then(pl.when(guessed).then(pl.lit(CUT_OFF[1])).otherwise(pl.lit(CUT_OFF[0])))
        .when(reason.is_in(ENDED_REASONS))
        .then(pl.lit("by itself"))
        .when((tokens == pl.col("max_tokens")) | shared)
        .then(pl.lit(CUT_OFF[2]))
        .otherwise(pl.lit("unknown"))
    ).to_series()


def demanded(config: CurationConfig) -> pl.Expr:
    """Whether a row of the pool in the making meets the strict demands. They may refuse a winner,
    and never crown another one."""
    met = [pl.lit(True)]
    if config.require_speedup_lower_above is not None:
        met.append(pl.col("_speedup_lower") > config.require_speedup_lower_above)
    if config.require_custom_kernel:
        met.append(pl.col("custom_kernels").list.len().fill_null(0) > 0)
    if config.require_rewritten_bottleneck:
        met.append(pl.col("rewrote_bottleneck").fill_null(False))
    if config.require_correct_on_every_gpu:
        met.append(pl.col("correct_on_every_gpu").fill_null(True))
    return pl.all_horizontal(met)


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


def known_ratio(frame: pl.DataFrame, name: str) -> pl.Expr:
    """A field of `timing`; null where the table was written without it, where nothing was timed at
    all, and where it is not a finite number above 0: such a row was not timed."""
    there = name in _fields(frame)
    value = (pl.col("timing").struct.field(name) if there else pl.lit(None)).cast(pl.Float64)
    return pl.when(value.is_finite() & (value > 0)).then(value)


def _fields(frame: pl.DataFrame) -> Json:
    return {field.name: field.dtype for field in getattr(frame.schema["timing"], "fields", [])}


def without_flags(config: CurationConfig) -> pl.Expr:
    """Whether the trace of a row has none of the flags that are to be excluded."""
    if not config.exclude_flags:
        return pl.lit(True)
    excluded = pl.element().is_in(list(config.exclude_flags))
    return ~pl.col("trace_flags").list.eval(excluded).list.any()


# -- what a frame must be --------------------------------------------------------------------------


def _refuse(problem: Problem | None) -> None:
    if problem:
        raise UsageError(*problem)


def _problems(frame: pl.DataFrame, config: CurationConfig) -> Iterator[Problem]:
    """What is wrong with a frame: columns that are missing or not of the kind that the rule reads,
    rows without an id, verdicts of versions that mean different things by the same column."""
    needed = [*COLUMNS, *(["custom_kernels"] if config.require_custom_kernel else [])]
    if missing := [name for name in needed if name not in frame.columns]:
        yield (
            f"curation needs the columns {', '.join(missing)}",
            "join a verification snapshot with the candidates it verified",
        )
    if config.require_rewritten_bottleneck and "rewrote_bottleneck" not in frame.columns:
        yield (
            "require_rewritten_bottleneck asks for profiles of these verdicts, and there are none",
            "run the refresh with --set profile.enabled=true, or leave it out",
        )
    fields = _fields(frame)
    for name, kind in KINDS.items():
        ratio = name.partition("timing.")[2]
        of = fields.get(ratio) if ratio else frame.schema.get(name)
        if of not in (None, pl.Null) and not _is(kind, of):
            yield f"{'' if ratio else 'the column '}{name} is {of}, not {kind}", FIX
    for name in ("candidate_id", "task_id"):
        if nulls := frame[name].null_count():
            yield f"{nulls} of {frame.height} rows have no {name}", FIX
    if "speedup" not in fields and frame["timing"].null_count() < frame.height:
        yield "the column timing is no struct with a field speedup", FIX
    correct = frame.filter(CORRECT)
    unknown = correct.get_column("trace_flags", default=pl.repeat(None, correct.height, eager=True))
    if config.exclude_flags and (count := unknown.null_count()):
        # a trace that was not measured has no flag, and is not known to be without one
        yield (
            f"the reasoning of {count} of {correct.height} correct samples was not measured,"
            " which exclude_flags asks about",
            "give candidates with their reasoning, or leave out exclude_flags",
        )
    versions = frame.get_column("schema_version", default=pl.Series([], dtype=pl.Int64))
    counts = dict(sorted(versions.drop_nulls().value_counts().iter_rows()))
    if len(counts) > 1:
        shown = ", ".join(f"version {version}: {count}" for version, count in counts.items())
        yield (
            f"the verdicts are of {len(counts)} schema versions ({shown})",
            "verify all candidates with one version of concur",
        )
    if (newest := max(counts, default=0)) > VERDICT_SCHEMA_VERSION:
        known = f"this concur knows {VERDICT_SCHEMA_VERSION}"
        yield f"the verdicts have schema version {newest}, {known}", "update concur"


def _is(kind: str, of: pl.DataType) -> bool:
    fits = {"numbers": of.is_numeric(), "lists": isinstance(of, pl.List)}
    return fits.get(kind, isinstance(of, TEXT))


def _unusable_lengths(correct: pl.DataFrame) -> Problem | None:
    tokens = pl.col("reasoning_tokens").cast(pl.Float64)
    unknown = correct.filter(~tokens.is_finite().fill_null(False))
    if unknown.height:
        return (
            f"{unknown.height} of {correct.height} correct samples of {_generators(unknown)} have"
            " no reasoning_tokens, which curation compares",
            "give that generator's tokenizer with --set synthesis.tokenizer=HUB_ID_OR_DIRECTORY and"
            " run synthesis again",
        )
    if correct.is_empty() or (correct["reasoning_tokens"] > 0).any():
        return None
    return (
        f"none of the {correct.height} correct samples of {_generators(correct)} has any"
        " reasoning to train on",
        "use a model that reasons, and a server that returns the text before </think>",
    )


def _generators(rows: pl.DataFrame) -> str:
    return ", ".join(sorted({str(name) for name in rows["generator"].unique().to_list()}))
