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

from typing import NamedTuple

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.records import Reason
from tasks.tables import CORRECT, TASK_ERROR

REQUIRED = ("task_id", "status", "reasoning_tokens")
TEXTS = ("task_id", "status", "finish_reason", "reason", "generator")
OPTIONAL = (
    *("candidate_id", "finish_reason", "reason", "generator", "sample_index"),
    *("level", "max_tokens"),
)
LEVEL_OF_ID = r"(?:^|/)L(\d+)/"  # of KernelBench's task ids
FIX = "join a verification snapshot with the candidates it verified"


class JudgedSamples(NamedTuple):
    """Samples with a length and an outcome.

    `data` has the columns task (a number per task_id, ascending), group, task_id, tokens, correct,
    truncated, speedup, generator, sample_index, stratum; sorted by task and sample_index. The
    stratum is the level and the token limit as far as columns of numbers (`level`, `max_tokens`) or
    the task's id (KernelBench's `L1/`) say them, "" where they do not; `group` is a number per task
    and stratum, in which samples are compared. `left_out` counts the other rows of the frame by
    reason. `knows_truncation` is False where no column says it.
    """

    data: pl.DataFrame
    rows: int
    left_out: dict[str, int]
    knows_truncation: bool


def samples_of(frame: pl.DataFrame) -> JudgedSamples:
    """Return the judged samples of a frame.

    It needs the columns `REQUIRED` and `timing` or `speedup` (a ratio); those of `OPTIONAL` are
    read where they are there. Raises UsageError for a missing or unusable column, and where no row
    is left.
    """
    missing = [name for name in REQUIRED if name not in frame.columns]
    if not {"timing", "speedup"} & set(frame.columns):
        missing.append("timing (or speedup)")
    if missing:
        raise UsageError(f"the analysis needs the columns {', '.join(missing)}", FIX)
    knows = bool({"reason", "finish_reason"} & set(frame.columns))
    data, left_out = _typed(frame), {}
    named, tokens = pl.col("candidate_id"), pl.col("tokens")
    for reason, out in {  # each reason in turn takes its own
        "repeated": named.is_not_null() & ~named.is_first_distinct(),
        "without a task or status": pl.any_horizontal(pl.col("task_id", "status").is_null()),
        "reference failed": TASK_ERROR,
        "length unknown": ~tokens.is_finite().fill_null(False),
        "no reasoning": tokens <= 0,
    }.items():
        kept = data.filter(~out)
        if count := data.height - kept.height:
            left_out[reason] = count
        data = kept
    if data.is_empty():
        counts = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise UsageError(
            f"no sample with a reasoning length and an outcome ({counts or 'the frame is empty'})",
            "verify candidates of a model that reasons",
        )
    right = CORRECT
    usable = right & pl.col("speedup").is_finite() & (pl.col("speedup") > 0)
    data = data.select(
        (pl.col("task_id").rank("dense") - 1).cast(pl.UInt32).alias("task"),
        (pl.struct("task_id", "stratum").rank("dense") - 1).cast(pl.UInt32).alias("group"),
        "task_id",
        "tokens",
        right.alias("correct"),
        "truncated",
        pl.when(usable).then("speedup").alias("speedup"),
        pl.col("generator").cast(pl.Categorical),
        "sample_index",
        "stratum",
    ).sort("task", "sample_index", maintain_order=True)
    return JudgedSamples(data, frame.height, left_out, knows)


def _typed(frame: pl.DataFrame) -> pl.DataFrame:
    """The columns that are read, in their types; an optional one that is missing is null."""
    absent = {name: None for name in OPTIONAL if name not in frame.columns}
    cut = (pl.col("finish_reason") == "length", pl.col("reason") == Reason.TRUNCATED.value)
    try:
        typed = frame.with_columns(**absent).select(
            "candidate_id",
            pl.col(TEXTS).cast(pl.String),
            _speedup(frame).cast(pl.Float64).alias("speedup"),
            pl.col("reasoning_tokens").cast(pl.Float64).alias("tokens"),
            pl.col("sample_index").cast(pl.Int64),
            pl.col("level", "max_tokens").cast(pl.Int64, strict=False).cast(pl.String),
        )
    except pl.exceptions.PolarsError as error:
        what = str(error).splitlines()[0]
        raise UsageError(
            f"a column holds something else than the analysis reads: {what}", FIX
        ) from error
    return typed.with_columns(
        pl.any_horizontal(each.fill_null(False) for each in cut).alias("truncated"),
        pl.col("generator").fill_null(""),
        stratum=pl.concat_str(
            "level " + pl.coalesce("level", pl.col("task_id").str.extract(LEVEL_OF_ID)),
            "limit " + pl.col("max_tokens") + " tokens",
            separator=", ",
            ignore_nulls=True,
        ),
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
