"""What scoring left out. Does not score."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from kernels_eval.records import Reason
from tasks.scores import excluded_tasks, nested, uncompiled_tasks
from tasks.tables import TASK_ERROR, unconfirmed


def remarks(frame: pl.DataFrame) -> list[str]:
    """Sentences on what scoring left out, counted as not right without a kernel verdict, or cannot
    tell."""
    return [
        *_broken_references(frame),
        *_samples_per_task(frame),
        *of_screened(frame),
        *_unknown_outcomes(frame),
        *_unknown_times(frame),
    ]


def _broken_references(frame: pl.DataFrame) -> Iterator[str]:
    failed = dict(frame.filter(TASK_ERROR)["task_id"].value_counts().iter_rows())
    excluded = excluded_tasks(frame)
    if excluded:
        named = ", ".join(f"{name} ({failed[name]:,} candidates)" for name in excluded)
        yield (
            "Benchmark tasks left out for every model, because their reference fails or is"
            f" degenerate for most candidates that reached it: {named}."
        )
    single = {name: count for name, count in sorted(failed.items()) if name not in excluded}
    if single:
        named = ", ".join(f"{name} ({count:,})" for name, count in single.items())
        yield (
            f"The reference failed for {sum(single.values()):,} candidates of tasks where it works"
            f" for most; they count as not correct: {named}."
        )


def _samples_per_task(frame: pl.DataFrame) -> Iterator[str]:
    tasks = frame["task_id"].n_unique()
    samples = frame.group_by("model", "task_id", maintain_order=True).len()
    counts = samples.group_by("model", maintain_order=True).agg(
        tasks=pl.len(), least=pl.col("len").min(), most=pl.col("len").max()
    )
    for model, answered, least, most in counts.iter_rows():
        if answered < tasks:
            left = f"{tasks - answered} of {tasks} tasks"
            yield f"Model {model} has no sample on {left}: its scores are of the others."
        if least < most:
            yield f"Model {model} has {least} to {most} samples per task; all tasks count alike."


def of_screened(frame: pl.DataFrame) -> Iterator[str]:
    """A sentence where right answers do not count because they are not confirmed."""
    screened = frame.filter(unconfirmed(frame))
    if screened.height:
        counts = screened["model"].value_counts(sort=True).iter_rows()
        whose = ", ".join(f"{model} {count:,}" for model, count in counts)
        yield (
            f"{screened.height:,} right answers were only screened: they count as not right"
            f" ({whose}). To have all confirmed, verify with verification.screen=false, and without"
            " --quick."
        )


def _unknown_outcomes(frame: pl.DataFrame) -> Iterator[str]:
    if nameless := frame["status"].null_count():
        yield f"{nameless:,} verdicts have no status: they count as not correct."
    alien = pl.col("reason") == Reason.NO_CUSTOM_KERNEL.value
    if silent := frame.filter(alien, pl.col("outputs_match").is_null()).height:
        yield (
            f"{silent} verdicts do not say whether outputs without a custom kernel were right: the"
            " track `any` counts them as wrong."
        )


def _unknown_times(frame: pl.DataFrame) -> Iterator[str]:
    speedup = nested(frame, "timing", "speedup").cast(pl.Float64)
    invalid = frame.filter(speedup.is_not_null(), ~((speedup > 0) & speedup.is_finite())).height
    if invalid:
        yield (
            f"{invalid:,} speedups are infinite, not a number or not above 0: these samples count"
            " as not timed."
        )
    if uncompiled := uncompiled_tasks(frame):
        yield (
            f"Scores against torch.compile leave out {len(uncompiled)} tasks without such a"
            f" baseline: {', '.join(uncompiled[:5])}."
        )
