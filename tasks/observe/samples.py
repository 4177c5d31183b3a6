"""Judged samples, one row each, with the others counted by reason.

`task_error` is left out; all other statuses but `correct` are incorrect. Lengths of two generators
do not compare.
"""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.records import Reason
from tasks.arl import LEVEL_OF_TASK
from tasks.tables import CORRECT, TASK_ERROR, completed

REQUIRED = ("task_id", "status", "reasoning_tokens")
TEXTS = ("task_id", "status", "finish_reason", "reason", "generator")
COLUMNS: dict[str, pl.DataType] = {
    **dict.fromkeys(("candidate_id", *TEXTS), pl.String()),
    **dict.fromkeys(("reasoning_tokens", "level", "max_tokens"), pl.Int64()),
    "speedup": pl.Float64(),
    "timing": pl.Struct({"speedup": pl.Float64()}),
}
"""What is read, if it is there."""
FIX = "join a verification snapshot with the candidates it verified"


class JudgedSamples(NamedTuple):
    """Samples with a length and an outcome.

    `data` has the columns task_id, group, reasoning_tokens, correct, truncated, speedup, generator
    and stratum, sorted by group and length. The stratum is level and token limit, "" where unknown;
    `group` numbers each task and stratum, in which samples are compared. `knows_truncation`: a
    column says which samples the token limit cut off.
    """

    data: pl.DataFrame
    rows: int
    left_out: dict[str, int]
    knows_truncation: bool


def samples_of(frame: pl.DataFrame) -> JudgedSamples:
    """Return the judged samples of verdicts joined with their candidates.

    Needs the columns `REQUIRED` and `timing` or `speedup` (a ratio). Raises UsageError for unusable
    columns, and where no row is left."""
    data, left_out = _typed(frame), dict[str, int]()
    tokens, candidate = pl.col("reasoning_tokens"), pl.col("candidate_id")
    unusable = {
        "repeated": candidate.is_not_null() & ~candidate.is_first_distinct(),
        "without a task or status": pl.any_horizontal(pl.col("task_id", "status").is_null()),
        "reference failed": TASK_ERROR,
        "length unknown": ~tokens.is_finite().fill_null(False),
        "no reasoning": tokens <= 0,
    }
    for reason, condition in unusable.items():  # each reason in turn takes its own
        kept = data.filter(~condition)
        if count := data.height - kept.height:
            left_out[reason] = count
        data = kept
    if data.is_empty():
        counts = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise UsageError(
            f"no sample with a reasoning length and an outcome ({counts or 'the frame is empty'})",
            "verify candidates of a model that reasons",
        )
    timed = CORRECT & pl.col("speedup").is_finite() & (pl.col("speedup") > 0)
    judged = data.select(
        "task_id",
        pl.struct("task_id", "stratum").rank("dense").cast(pl.UInt32).alias("group"),
        "reasoning_tokens",
        CORRECT.alias("correct"),
        "truncated",
        pl.when(timed).then("speedup").alias("speedup"),
        "generator",
        "stratum",
    )
    knows = bool({"reason", "finish_reason"} & set(frame.columns))
    ordered = judged.sort("group", "reasoning_tokens", "speedup", "correct")
    return JudgedSamples(ordered, frame.height, left_out, knows)


def _typed(frame: pl.DataFrame) -> pl.DataFrame:
    known = completed(frame, COLUMNS, REQUIRED, what="the analysis", fix=FIX)
    if not {"timing", "speedup"} & set(frame.columns):
        raise UsageError("the analysis needs the columns timing (or speedup)", FIX)
    speedup = pl.coalesce("speedup", pl.col("timing").struct.field("speedup"))
    cut_off = (pl.col("finish_reason") == "length").fill_null(False)
    truncated = (pl.col("reason") == Reason.TRUNCATED.value).fill_null(False)
    numbers = pl.col("level", "max_tokens").cast(pl.Int64).cast(pl.String)
    typed = known.with_columns(numbers, pl.col(TEXTS).cast(pl.String))
    level = "level " + pl.coalesce("level", LEVEL_OF_TASK)
    limit = "limit " + pl.col("max_tokens") + " tokens"
    return typed.select(
        *("candidate_id", "task_id", "status"),
        pl.col("reasoning_tokens").cast(pl.Float64),
        speedup=speedup.cast(pl.Float64),
        truncated=cut_off | truncated,
        generator=pl.col("generator").fill_null(""),
        stratum=pl.concat_str(level, limit, separator=", ", ignore_nulls=True),
    )
