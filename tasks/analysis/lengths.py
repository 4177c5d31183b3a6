"""What the analysis of reasoning lengths reads: one row a judged sample, with everything left out
counted by its reason.

Guarantees: each candidate once; a length above 0 and a known outcome in every row; speedups that
are missing, not finite or not positive are null, never a number. Does not guarantee that lengths of
two generators compare: each counts with its own tokenizer.

Of the statuses only `correct` is correct. `task_error` says nothing of a sample and is left out;
all others count as incorrect, also `no_code` and `rejected`: whoever pays for reasoning pays for
those too. A sample that the token limit cut off is `truncated`: it is long and incorrect because of
the limit, so every analysis is made with and without such samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.records import Reason

REQUIRED = ("task_id", "status", "reasoning_tokens")
FIX = "join a verification snapshot with the candidates it verified"


@dataclass(frozen=True)
class JudgedSamples:
    """Samples with a length and an outcome.

    `data` has the columns task (a number per task_id, ascending), task_id, tokens, correct,
    truncated, speedup, generator, sample_index; sorted by task and sample_index. `left_out` counts
    the other rows of the frame by reason. `knows_truncation` is False where no column says it.
    """

    data: pl.DataFrame
    rows: int
    left_out: dict[str, int]
    knows_truncation: bool


def samples_of(frame: pl.DataFrame) -> JudgedSamples:
    """Return the judged samples of a frame.

    It needs the columns `REQUIRED` and `timing` or `speedup` (a ratio); candidate_id, reason,
    finish_reason, generator and sample_index are read where they are there. Raises UsageError for a
    missing or unusable column, and where no row is left.
    """
    missing = [name for name in REQUIRED if name not in frame.columns]
    if not {"timing", "speedup"} & set(frame.columns):
        missing.append("timing (or speedup)")
    if missing:
        raise UsageError(f"the analysis needs the columns {', '.join(missing)}", FIX)
    rows = frame.height
    if "candidate_id" in frame.columns:
        frame = frame.filter(
            pl.col("candidate_id").is_null() | pl.col("candidate_id").is_first_distinct()
        )
    data, left_out = _judged(_columns(frame))
    left_out = {"repeated": rows - frame.height} | left_out
    left_out = {reason: count for reason, count in left_out.items() if count}
    if data.is_empty():
        counts = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise UsageError(
            f"no sample with a reasoning length and an outcome ({counts or 'the frame is empty'})",
            "verify candidates of a model that reasons",
        )
    right = pl.col("status") == "correct"
    usable = right & pl.col("speedup").is_finite() & (pl.col("speedup") > 0)
    data = data.select(
        (pl.col("task_id").rank("dense") - 1).cast(pl.UInt32).alias("task"),
        "task_id",
        "tokens",
        right.alias("correct"),
        "truncated",
        pl.when(usable).then("speedup").alias("speedup"),
        pl.col("generator").cast(pl.Categorical),
        "sample_index",
    ).sort("task", "sample_index", maintain_order=True)
    knows = bool({"reason", "finish_reason"} & set(frame.columns))
    return JudgedSamples(data, rows, left_out, knows)


def _columns(frame: pl.DataFrame) -> pl.DataFrame:
    """The columns that are read, in their types."""

    def text(name: str) -> pl.Expr:
        there = name in frame.columns
        return pl.col(name).cast(pl.String) if there else pl.lit(None, pl.String)

    number = "sample_index" in frame.columns
    cut = (text("finish_reason") == "length", text("reason") == Reason.TRUNCATED.value)
    try:
        return frame.select(
            text("task_id").alias("task_id"),
            text("status").alias("status"),
            pl.col("reasoning_tokens").cast(pl.Float64).alias("tokens"),
            _speedup(frame).alias("speedup"),
            pl.any_horizontal(each.fill_null(False) for each in cut).alias("truncated"),
            text("generator").fill_null("").alias("generator"),
            (pl.col("sample_index") if number else pl.lit(0)).cast(pl.Int64).alias("sample_index"),
        )
    except pl.exceptions.PolarsError as error:
        what = str(error).splitlines()[0]
        raise UsageError(
            f"a column holds something else than the analysis reads: {what}", FIX
        ) from error


def _judged(data: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, int]]:
    """The rows that are left when each reason in turn takes its own, and the counts of these."""
    tokens = pl.col("tokens")
    left_out = {}
    for reason, out in (
        ("without a task or status", pl.col("task_id").is_null() | pl.col("status").is_null()),
        ("reference failed", pl.col("status") == "task_error"),
        ("length unknown", ~tokens.is_finite().fill_null(False)),
        ("no reasoning", tokens <= 0),
    ):
        kept = data.filter(~out)
        left_out[reason], data = data.height - kept.height, kept
    return data, left_out


def _speedup(frame: pl.DataFrame) -> pl.Expr:
    if "speedup" in frame.columns:
        return pl.col("speedup").cast(pl.Float64)
    kind = frame.schema["timing"]
    if kind == pl.Null:
        return pl.lit(None, pl.Float64)
    if not isinstance(kind, pl.Struct) or "speedup" not in {field.name for field in kind.fields}:
        raise UsageError(f"the column timing is {kind}, without a field speedup", FIX)
    return pl.col("timing").struct.field("speedup").cast(pl.Float64)
