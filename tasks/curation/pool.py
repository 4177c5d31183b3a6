"""The samples that every strategy chooses from.

Guarantees: all strategies see one pool, so that they differ in their rule alone: samples with
status "correct", of the first turn, with a reasoning, each candidate once, sorted by task_id,
sample_index and candidate_id whatever the order of the rows. No Python object is made per row. Does
not guarantee that a speedup is certain: `_unmet` names the strict demand that a sample does not
meet.

A frame holds one row per candidate with the columns of tasks.tables.VERDICTS and CANDIDATES
(`COLUMNS` are needed, `OPTIONAL` are read where the frame has them).
"""

from __future__ import annotations

import polars as pl

from tasks.curation.checks import COLUMNS, require_lengths, require_usable, timing_fields
from tasks.curation.config import CurationConfig
from tasks.curation.reasons import WhyNot
from tasks.operators import is_single_operator
from tasks.tables import CORRECT

OPTIONAL = (
    *("schema_version", "turn", "custom_kernels", "reason", "trace_flags", "kernel"),
    *("finish_reason", "finish_guessed", "completion_tokens", "max_tokens"),
    *("rewrote_bottleneck", "correct_on_every_gpu"),
)
BOUNDS = ("speedup_lower", "speedup_upper")
CUT_OFF = ("cut off (recorded)", "cut off (guessed from the text)", "cut off (guessed from tokens)")
CUT_REASONS = ("length", "max_tokens", "max_length")
ENDED_REASONS = ("stop", "eos", "eos_token", "end_turn", "stop_sequence")
"""Finish reasons as servers name them, in small letters."""


def marked(frame: pl.DataFrame, config: CurationConfig) -> pl.DataFrame:
    """The frame's columns that decide, and `_row`, its row in `frame`; `_ended`, how its answer
    ended; `_single`, is its task a single operator; `_why_not`, why it is not in the pool, null
    where it is.

    A sample with one of `exclude_flags` is left out as if it had never been drawn: another of its
    task may be the shortest or fastest then; the same holds for an answer that the token limit cut
    off. A correct answer whose reasoning is empty (a response that lost its think tags) has no
    trace to train on, and its zero tokens would make it the shortest of its task. A candidate_id
    that occurs twice counts once.

    Raises UsageError for missing columns and columns of another kind, rows without an id, verdicts
    of different or newer schema versions, a correct sample without reasoning_tokens, and where no
    correct sample has any reasoning.
    """
    require_usable(frame, config)
    known = [name for name in (*COLUMNS, *OPTIONAL) if name in frame.columns]
    rows = frame.select(known).with_columns(_ended=ends(frame)).with_row_index("_row")
    excluded = pl.coalesce(
        _refused(~CORRECT.fill_null(False), WhyNot.NOT_CORRECT),
        _refused(_is_later_turn(frame, config), WhyNot.LATER_TURN),
        _refused(_is_cut_off(config), WhyNot.CUT_OFF),
        _refused(_has_excluded_flag(frame, config), WhyNot.TRACE_FLAG),
    )
    single = is_single_operator(pl.col("reference_operators"))
    rows = rows.with_columns(_why_not=excluded, _single=single).drop("reference_operators")
    # of two rows of a candidate the first that may be taken counts, else the first
    may_be_taken = pl.col("_why_not").is_null()
    rows = pl.concat([rows.filter(may_be_taken), rows.filter(~may_be_taken)])
    rows = rows.filter(pl.col("candidate_id").is_first_distinct())
    require_lengths(rows.filter(may_be_taken))
    silent = _refused(pl.col("reasoning_tokens") <= 0, WhyNot.NO_REASONING)
    return rows.with_columns(_why_not=pl.coalesce("_why_not", silent))


def eligible_samples(frame: pl.DataFrame, config: CurationConfig | None = None) -> pl.DataFrame:
    """The pool of a frame: one row per sample that may be taken. See `marked` and `pool_of`."""
    config = config or CurationConfig()
    return pool_of(marked(frame, config), config)


def pool_of(rows: pl.DataFrame, config: CurationConfig) -> pl.DataFrame:
    """The pool among the rows of `marked`, with few columns.

    `_speedup`, `_speedup_lower`, `_speedup_upper` are ratios. A sample without a finite, positive
    speedup counts as not timed: 0 in all three. One without bounds has its speedup for both.
    `_unmet`: which strict demand (`require_...`) it does
    not meet, null where it meets them. `_kernel` is the same for equal kernels of a task (the
    frame's `kernel`, where it is known). `_rivals`: the samples of its task in the pool.
    """
    eligible = rows.filter(pl.col("_why_not").is_null())
    speedup = pl.col("_speedup")
    bounds = {
        f"_{name}": pl.when(speedup > 0)
        .then(pl.coalesce(known_ratio(rows, name), speedup))
        .otherwise(0.0)
        for name in BOUNDS
    }
    kernel = pl.col("kernel") if "kernel" in rows.columns else pl.lit(None, pl.String)
    return (
        eligible.with_columns(_speedup=known_ratio(rows, "speedup").fill_null(0.0))
        .with_columns(**bounds)
        .select(
            *("_row", "_ended", "candidate_id", "task_id", "sample_index", "reasoning_tokens"),
            *("_speedup", *(f"_{name}" for name in BOUNDS), "_single"),
            _unmet=_unmet_demand(rows, config),
            _kernel=pl.coalesce(kernel, pl.col("candidate_id").cast(pl.String)),
            _rivals=pl.len().over("task_id"),
        )
        .sort("task_id", "sample_index", "candidate_id")
    )


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


def known_ratio(frame: pl.DataFrame, name: str) -> pl.Expr:
    """A field of `timing`; null where the table was written without it, where nothing was timed at
    all, and where it is not a finite number above 0: such a row was not timed."""
    there = name in timing_fields(frame)
    value = (pl.col("timing").struct.field(name) if there else pl.lit(None)).cast(pl.Float64)
    return pl.when(value.is_finite() & (value > 0)).then(value)


# -- conditions ------------------------------------------------------------------------------------


def _refused(condition: pl.Expr, why: WhyNot) -> pl.Expr:
    return pl.when(condition).then(pl.lit(why.value))


def _is_later_turn(frame: pl.DataFrame, config: CurationConfig) -> pl.Expr:
    if config.later_turns or "turn" not in frame.columns:
        return pl.lit(False)
    return pl.col("turn").fill_null(1) != 1


def _is_cut_off(config: CurationConfig) -> pl.Expr:
    return pl.lit(False) if config.cut_off_answers else pl.col("_ended").is_in(CUT_OFF)


def _has_excluded_flag(frame: pl.DataFrame, config: CurationConfig) -> pl.Expr:
    if not config.exclude_flags or "trace_flags" not in frame.columns:
        return pl.lit(False)
    excluded = pl.element().is_in(list(config.exclude_flags))
    return pl.col("trace_flags").list.eval(excluded).list.any()


def _unmet_demand(frame: pl.DataFrame, config: CurationConfig) -> pl.Expr:
    """Strict demands may refuse a winner, and never crown another one."""
    unmet = [pl.lit(None, pl.String)]
    least = config.require_speedup_lower_above
    if least is not None:
        unmet.append(_refused(pl.col("_speedup_lower") <= least, WhyNot.SPEEDUP_BOUND))
    if config.require_custom_kernel:
        none = pl.col("custom_kernels").list.len().fill_null(0) == 0
        unmet.append(_refused(none, WhyNot.NO_CUSTOM_KERNEL))
    if config.require_rewritten_bottleneck:
        kept = ~pl.col("rewrote_bottleneck").fill_null(False)
        unmet.append(_refused(kept, WhyNot.BOTTLENECK_KEPT))
    if config.require_correct_on_every_gpu and "correct_on_every_gpu" in frame.columns:
        failed = ~pl.col("correct_on_every_gpu").fill_null(True)
        unmet.append(_refused(failed, WhyNot.NOT_ON_EVERY_GPU))
    return pl.coalesce(unmet)
