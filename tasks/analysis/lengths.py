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
from typing import TYPE_CHECKING

from kernels_eval.errors import UsageError
from kernels_eval.records import Reason

if TYPE_CHECKING:
    import polars as pl

REQUIRED = ("task_id", "status", "reasoning_tokens")
OPTIONAL = ("candidate_id", "reason", "finish_reason", "generator", "sample_index")
FIX = "join a verification snapshot with the candidates it verified"


@dataclass(frozen=True)
class Samples:
    """`data` has the columns task (a number per task_id, ascending), tokens, correct, truncated,
    speedup, generator, sample_index; sorted by task and sample_index. `left_out` counts the other
    rows of the frame by reason. `knows_truncation` is False where no column says it.
    """

    data: pl.DataFrame
    task_ids: pl.Series
    rows: int
    left_out: dict[str, int]
    knows_truncation: bool

    def complete(self) -> pl.DataFrame:
        """The rows that the token limit did not cut off."""
        import polars as pl

        return self.data.filter(~pl.col("truncated"))


def samples_of(frame: pl.DataFrame) -> Samples:
    """The judged samples of a frame with the columns `REQUIRED`, those of `OPTIONAL` that are
    there, and `timing` or `speedup` (a ratio).

    Raises UsageError for a missing or unusable column, and where no row is left.
    """
    import polars as pl

    _require(frame)
    rows = frame.height
    if "candidate_id" in frame.columns:
        frame = frame.filter(
            pl.col("candidate_id").is_null() | pl.col("candidate_id").is_first_distinct()
        )
    try:
        data = frame.select(
            pl.col("task_id").cast(pl.String),
            pl.col("status").cast(pl.String),
            pl.col("reasoning_tokens").cast(pl.Float64).alias("tokens"),
            _speedup(frame).alias("speedup"),
            _truncated(frame).alias("truncated"),
            (pl.col("generator").cast(pl.String) if "generator" in frame.columns else pl.lit(""))
            .fill_null("")
            .alias("generator"),
            (
                pl.col("sample_index").cast(pl.Int64)
                if "sample_index" in frame.columns
                else pl.lit(0, pl.Int64)
            ).alias("sample_index"),
        )
    except pl.exceptions.PolarsError as error:
        raise UsageError(
            f"a column holds something else than the analysis reads: {str(error).splitlines()[0]}",
            FIX,
        ) from error
    known_length = pl.col("tokens").is_finite().fill_null(False)
    left_out = {
        "repeated": rows - frame.height,
        "without a task or status": data.filter(_unnamed()).height,
        "reference failed": data.filter(~_unnamed() & (pl.col("status") == "task_error")).height,
    }
    data = data.filter(~_unnamed() & (pl.col("status") != "task_error"))
    left_out["length unknown"] = data.filter(~known_length).height
    left_out["no reasoning"] = data.filter(known_length & (pl.col("tokens") <= 0)).height
    data = data.filter(known_length & (pl.col("tokens") > 0))
    if data.is_empty():
        said = (
            ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count)
            or "the frame is empty"
        )
        raise UsageError(
            f"no sample with a reasoning length and an outcome ({said})",
            "verify candidates of a model that reasons",
        )
    task_ids = data["task_id"].unique().sort()
    codes = pl.DataFrame(
        {"task_id": task_ids, "task": pl.Series(range(len(task_ids)), dtype=pl.UInt32)}
    )
    data = (
        data.join(codes, on="task_id", how="left")
        .select(
            "task",
            "tokens",
            (pl.col("status") == "correct").alias("correct"),
            "truncated",
            pl.when(
                (pl.col("status") == "correct")
                & pl.col("speedup").is_finite()
                & (pl.col("speedup") > 0)
            )
            .then("speedup")
            .alias("speedup"),
            pl.col("generator").cast(pl.Categorical),
            "sample_index",
        )
        .sort("task", "sample_index", maintain_order=True)
    )
    knows = any(name in frame.columns for name in ("reason", "finish_reason"))
    return Samples(
        data, task_ids, rows, {reason: count for reason, count in left_out.items() if count}, knows
    )


def _require(frame: pl.DataFrame) -> None:
    missing = [name for name in REQUIRED if name not in frame.columns]
    if "timing" not in frame.columns and "speedup" not in frame.columns:
        missing.append("timing (or speedup)")
    if missing:
        raise UsageError(f"the analysis needs the columns {', '.join(missing)}", FIX)


def _unnamed() -> pl.Expr:
    import polars as pl

    return pl.col("task_id").is_null() | pl.col("status").is_null()


def _speedup(frame: pl.DataFrame) -> pl.Expr:
    import polars as pl

    if "speedup" in frame.columns:
        return pl.col("speedup").cast(pl.Float64)
    kind = frame.schema["timing"]
    if kind == pl.Null:
        return pl.lit(None, pl.Float64)
    if not isinstance(kind, pl.Struct) or "speedup" not in {field.name for field in kind.fields}:
        raise UsageError(f"the column timing is {kind}, without a field speedup", FIX)
    return pl.col("timing").struct.field("speedup").cast(pl.Float64)


def _truncated(frame: pl.DataFrame) -> pl.Expr:
    import polars as pl

    said = [pl.lit(False)]
    if "finish_reason" in frame.columns:
        said.append((pl.col("finish_reason").cast(pl.String) == "length").fill_null(False))
    if "reason" in frame.columns:
        said.append((pl.col("reason").cast(pl.String) == Reason.TRUNCATED.value).fill_null(False))
    return pl.any_horizontal(said)
