"""A table of verdicts read by another standard, without verifying again."""

from __future__ import annotations

from typing import Literal

import polars as pl

from kernels_eval.records import Reason, Status

FLAG = Reason.APPROXIMATION.value


def read_by(frame: pl.DataFrame, formula: Literal["require", "flag"]) -> pl.DataFrame:
    """The verdicts as this `correctness.formula` would have them, from a table made with either.

    `frame` has the columns status, reason and flags. With "flag", approximations that KernelBench's
    1e-4 accepts are correct; where the table was made with "require" they have no timing. With
    "require" they are incorrect and lose theirs.
    """
    taken = (pl.col("status") == Status.CORRECT.value) & pl.col("flags").list.contains(FLAG)
    approximate = (pl.col("reason") == FLAG) | taken
    reason = Reason.OK if formula == "flag" else Reason.APPROXIMATION
    changed = {"status": pl.lit(reason.status.value), "reason": pl.lit(reason.value)}
    if formula == "require" and "timing" in frame.columns:
        changed["timing"] = pl.lit(None)
    return frame.with_columns(
        pl.when(approximate).then(value).otherwise(pl.col(name)).alias(name)
        for name, value in changed.items()
    )
