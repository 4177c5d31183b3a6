"""What scoring left out, and the same verdicts under a limit of tokens.

Guarantees: a task that scoring leaves out stays left out under a limit. Does not score.
"""

from __future__ import annotations

import polars as pl

from kernels_eval.records import Reason, Status
from tasks.scores import excluded_tasks, nested
from tasks.tables import CORRECT, TASK_ERROR


def remarks(frame: pl.DataFrame) -> dict[str, str]:
    """What scoring left out or counts as not right without a verdict on the kernel, a sentence
    each by what it is about; only what there is."""
    found = {}
    failed = dict(frame.filter(TASK_ERROR)["task_id"].value_counts().iter_rows())
    excluded = excluded_tasks(frame)
    if excluded:
        named = ", ".join(f"{name} ({failed[name]:,} candidates)" for name in excluded)
        found["excluded"] = (
            "Benchmark tasks left out for every model, because their reference fails or is"
            f" degenerate for most candidates that reached it: {named}."
        )
    single = {name: count for name, count in sorted(failed.items()) if name not in excluded}
    if single:
        named = ", ".join(f"{name} ({count:,})" for name, count in single.items())
        found["task_errors"] = (
            f"The reference failed for {sum(single.values()):,} candidates of tasks where it works"
            f" for most; they count as not correct: {named}."
        )
    if nameless := frame["status"].null_count():
        found["without_status"] = (
            f"{nameless:,} verdicts have no status: they count as not correct."
        )
    speedup = nested(frame, "timing", "speedup").cast(pl.Float64)
    invalid = frame.filter(speedup.is_not_null(), ~((speedup > 0) & speedup.is_finite())).height
    if invalid:
        found["speedups"] = (
            f"{invalid:,} speedups are infinite, not a number or not above 0: these samples count"
            " as not timed."
        )
    return found


def within_tokens(frame: pl.DataFrame, limit: int) -> pl.DataFrame:
    """The verdicts as they would be with answers of at most `limit` completion tokens: a longer one
    is no answer."""
    known = frame.filter(~pl.col("task_id").is_in(excluded_tasks(frame)))
    over = ((pl.col("completion_tokens") > limit) | TASK_ERROR).fill_null(False)
    cut = {"status": Status.NO_CODE, "reason": Reason.TRUNCATED, "timing": None}
    cut["outputs_match"] = None
    return known.with_columns(
        pl.when(over).then(pl.lit(value)).otherwise(pl.col(name)).alias(name)
        for name, value in cut.items()
    )


def unknown_lengths(frame: pl.DataFrame) -> dict[str, int]:
    """model -> how many of its right answers have no token count; only models with any."""
    right = CORRECT | (pl.col("reason") == Reason.NO_CUSTOM_KERNEL.value)
    rows = frame.filter(right, pl.col("completion_tokens").is_null())
    return dict(rows["model"].value_counts().iter_rows())
