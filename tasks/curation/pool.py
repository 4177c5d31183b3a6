"""The samples that every strategy chooses from: correct first-turn samples with reasoning, each
once, sorted by task_id, sample_index and candidate_id. Frames have columns of
`tasks.curation.checks`."""

from __future__ import annotations

import polars as pl

from tasks.curation.checks import RATIOS, require_lengths, usable
from tasks.curation.config import CurationConfig
from tasks.curation.reasons import WhyNot
from tasks.operators import is_single_operator
from tasks.scores import SHARE_COLUMN, known_ratio
from tasks.tables import CORRECT

_, *BOUNDS = RATIOS
CUT_OFF = ("cut off (recorded)", "cut off (guessed from the text)", "cut off (guessed from tokens)")
CUT_REASONS = ("length", "max_tokens", "max_length")
ENDED_REASONS = ("stop", "eos", "eos_token", "end_turn", "stop_sequence")
"""Finish reasons as servers name them, in small letters."""


def marked(frame: pl.DataFrame, config: CurationConfig) -> pl.DataFrame:
    """The frame's deciding columns, and `_row`, its row in `frame`; `_ended`, how the answer ended;
    `_single`, whether the task is a single operator; `_why_not`, why it is not in the pool, or
    null.

    Samples with one of `exclude_flags`, with less than `min_kernel_share`, or cut off by the token
    limit count as never drawn: another
    may then be the shortest or fastest. A repeated candidate_id counts once. Raises UsageError as
    `usable` and `require_lengths` do.
    """
    rows = usable(frame, config)
    rows = rows.with_columns(_ended=ends(rows)).with_row_index("_row")
    excluded = pl.coalesce(
        _refused(~CORRECT.fill_null(False), WhyNot.NOT_CORRECT),
        _refused(_is_later_turn(config), WhyNot.LATER_TURN),
        _refused(_is_cut_off(config), WhyNot.CUT_OFF),
        _refused(_is_fig_leaf(config), WhyNot.KERNEL_SHARE),
        _refused(_has_excluded_flag(config), WhyNot.TRACE_FLAG),
    )
    single = is_single_operator(pl.col("reference_operators"))
    rows = rows.with_columns(_why_not=excluded, _single=single).drop("reference_operators")
    # of two rows of a candidate the first that may be taken counts, else the first
    may_be_taken = pl.col("_why_not").is_null()
    rows = pl.concat([rows.filter(may_be_taken), rows.filter(~may_be_taken)])
    rows = rows.filter(pl.col("candidate_id").is_first_distinct())
    require_lengths(rows.filter(may_be_taken), none=config.without_reasoning)
    silent = _refused(_is_silent(config), WhyNot.NO_REASONING)
    return rows.with_columns(_why_not=pl.coalesce("_why_not", silent))


def eligible_samples(frame: pl.DataFrame, config: CurationConfig) -> pl.DataFrame:
    return pool_of(marked(frame, config), config)


def pool_of(rows: pl.DataFrame, config: CurationConfig) -> pl.DataFrame:
    """The pool among the rows of `marked`, with few columns.

    `_speedup`, `_speedup_lower`, `_speedup_upper` are ratios: 0 where not timed, and the speedup
    itself without bounds. `_unmet` is the failed strict demand (`require_...`), or null. `_kernel`
    is equal for a task's equal kernels. `_rivals` counts the task's samples in the pool.
    """
    eligible = rows.filter(pl.col("_why_not").is_null())
    speedup = pl.col("_speedup")
    bounds = {
        f"_{name}": pl.when(speedup > 0)
        .then(pl.coalesce(known_ratio(rows, name), speedup))
        .otherwise(0.0)
        for name in BOUNDS
    }
    return (
        eligible.with_columns(_speedup=known_ratio(rows, "speedup").fill_null(0.0))
        .with_columns(**bounds)
        .select(
            *("_row", "_ended", "candidate_id", "task_id", "sample_index", "reasoning_tokens"),
            *("_speedup", *(f"_{name}" for name in BOUNDS), "_single"),
            _unmet=_unmet_demand(config),
            _kernel=pl.coalesce("kernel", pl.col("candidate_id").cast(pl.String)),
            _rivals=pl.len().over("task_id"),
        )
        .sort("task_id", "sample_index", "candidate_id")
    )


def ends(rows: pl.DataFrame) -> pl.Series:
    """Why each answer ended: one of `CUT_OFF`, "by itself", or "unknown". Without a known
    finish_reason, answers of exactly max_tokens, or of their generator's greatest length where
    several tasks have it, were cut off."""
    reason = pl.col("finish_reason").cast(pl.String).str.to_lowercase()
    tokens = pl.col("completion_tokens")
    longest = tokens == tokens.max().over("generator")
    shared = longest & (pl.col("task_id").n_unique().over("generator", tokens) > 1)
    guessed = pl.col("finish_guessed").fill_null(False)
    return rows.select(
        _ends=pl.when(reason.is_in(CUT_REASONS))
        .then(pl.when(guessed).then(pl.lit(CUT_OFF[1])).otherwise(pl.lit(CUT_OFF[0])))
        .when(reason.is_in(ENDED_REASONS))
        .then(pl.lit("by itself"))
        .when((tokens == pl.col("max_tokens")) | shared)
        .then(pl.lit(CUT_OFF[2]))
        .otherwise(pl.lit("unknown"))
    ).to_series()


# -- conditions ------------------------------------------------------------------------------------


def _refused(condition: pl.Expr, why: WhyNot) -> pl.Expr:
    return pl.when(condition).then(pl.lit(why.value))


def _is_later_turn(config: CurationConfig) -> pl.Expr:
    return pl.lit(False) if config.later_turns else pl.col("turn").fill_null(1) != 1


def _is_cut_off(config: CurationConfig) -> pl.Expr:
    return pl.lit(False) if config.cut_off_answers else pl.col("_ended").is_in(CUT_OFF)


def _is_silent(config: CurationConfig) -> pl.Expr:
    return pl.lit(False) if config.without_reasoning else pl.col("reasoning_tokens") <= 0


def _is_fig_leaf(config: CurationConfig) -> pl.Expr:
    return pl.col(SHARE_COLUMN).fill_null(0.0) < (config.min_kernel_share or 0.0)


def _has_excluded_flag(config: CurationConfig) -> pl.Expr:
    excluded = pl.element().is_in(list(config.exclude_flags))
    return pl.col("trace_flags").list.eval(excluded).list.any()


def _unmet_demand(config: CurationConfig) -> pl.Expr:
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
    if config.require_correct_on_every_gpu:
        failed = ~pl.col("correct_on_every_gpu").fill_null(True)
        unmet.append(_refused(failed, WhyNot.NOT_ON_EVERY_GPU))
    return pl.coalesce(unmet)
