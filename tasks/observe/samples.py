"""Judged samples, one row each, with the others counted by reason.

`task_error` is left out; all statuses but `correct` are incorrect, also `no_code` and `rejected`,
whose reasoning cost as much. Lengths of two generators do not compare.
"""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.records import Reason
from tasks.arl import LEVEL_OF_TASK
from tasks.tables import CORRECT, TASK_ERROR

REQUIRED = ("task_id", "status", "reasoning_tokens")
OPTIONAL = ("candidate_id", "finish_reason", "reason", "generator", "level", "max_tokens")
TEXTS = ("task_id", "status", "finish_reason", "reason", "generator")
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

    Needs the columns `REQUIRED` and `timing` or `speedup` (a ratio); `OPTIONAL` ones are used.
    Raises UsageError for unusable columns, and where no row is left.
    """
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
    missing = [name for name in REQUIRED if name not in frame.columns]
    if not {"timing", "speedup"} & set(frame.columns):
        missing.append("timing (or speedup)")
    if missing:
        raise UsageError(f"the analysis needs the columns {', '.join(missing)}", FIX)
    absent = {name: None for name in OPTIONAL if name not in frame.columns}
    try:
        typed = frame.with_columns(**absent).select(
            "candidate_id",
            pl.col(TEXTS).cast(pl.String),
            _speedup(frame).cast(pl.Float64).alias("speedup"),
            pl.col("reasoning_tokens").cast(pl.Float64),
            pl.col("level", "max_tokens").cast(pl.Int64, strict=False).cast(pl.String),
        )
    except pl.exceptions.PolarsError as error:
        problem = str(error).splitlines()[0]
        raise UsageError(
            f"a column holds something else than the analysis reads: {problem}", FIX
        ) from error
    cut_off = (pl.col("finish_reason") == "length").fill_null(False)
    truncated = (pl.col("reason") == Reason.TRUNCATED.value).fill_null(False)
    level = "level " + pl.coalesce("level", LEVEL_OF_TASK)
    limit = "limit " + pl.col("max_tokens") + " tokens"
    return typed.with_columns(
        truncated=cut_off | truncated,
        generator=pl.col("generator").fill_null(""),
        stratum=pl.concat_str(level, limit, separator=", ", ignore_nulls=True),
    )


def _speedup(frame: pl.DataFrame) -> pl.Expr:
    if "speedup" in frame.columns:
        return pl.col("speedup")
    kind = frame.schema["timing"]
    if kind == pl.Null:
        return pl.lit(None)
    if not isinstance(kind, pl.Struct) or "speedup" not in {field.name for field in kind.fields}:
        raise UsageError(f"the column timing is {kind}, without a field speedup", FIX)
    return pl.col("timing").struct.field("speedup")
