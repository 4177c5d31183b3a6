"""Contents of training sets, as records and as one table. Every sample counts once, in one family
of its task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import polars as pl

from kernels_eval.records import Record
from tasks.operators import is_single_operator
from tasks.reporting.page import markdown
from tasks.reporting.parts import Cell, Part, table_of
from tasks.reporting.text import by_count, interval, number
from tasks.scores import known_ratio
from tasks.shares import LEFT_OUT_COLUMNS, LeftOut, left_out

UNKNOWN = "unknown"
LEADING = (
    "attention",
    "convolution",
    "rnn",
    "matmul",
    "fft",
    "linear_algebra",
    "softmax",
    "normalisation",
    "pooling",
    "cumulative",
)
"""Families in order of precedence: what a task's kernel mostly computes."""


class SetComposition(Record):
    """Content of one training set. `families` counts samples, the most frequent first; medians are
    None without any value; `timed` samples have a speedup."""

    name: str
    samples: int
    tasks: int
    single_operator: int
    fusion: int
    families: dict[str, int]
    timed: int
    median_tokens: float | None
    median_speedup: float | None
    left_out: tuple[LeftOut, ...] = ()
    """what `min_kernel_share` would leave out"""


def leading_family(families: Sequence[str]) -> str:
    """The family that stands for a task: its first in LEADING, else the first given, else
    UNKNOWN."""
    return next((name for name in (*LEADING, *families) if name in families), UNKNOWN)


def composition(
    name: str, rows: pl.DataFrame, families: pl.DataFrame | None = None
) -> SetComposition:
    """Content of a set: `rows` has a line per sample with task_id, reasoning_tokens, timing and
    reference_operators; `families` has task_id and family (None: all unknown)."""
    family = pl.Series([UNKNOWN] * rows.height, dtype=pl.String)
    if families is not None:
        tasks = rows.select(pl.col("task_id").cast(pl.String))
        family = tasks.join(families, on="task_id", how="left")["family"].fill_null(UNKNOWN)
    singles = int(rows.select(is_single_operator(pl.col("reference_operators")).sum()).item())
    timed = rows.with_columns(speedup=known_ratio(rows, "speedup"))
    speedups = timed["speedup"].drop_nulls()
    return SetComposition(
        name=name,
        samples=rows.height,
        tasks=rows["task_id"].n_unique(),
        single_operator=singles,
        fusion=rows.height - singles,
        families=dict(by_count(dict(family.value_counts().iter_rows()))),
        timed=len(speedups),
        median_tokens=_median(rows["reasoning_tokens"]),
        median_speedup=_median(speedups),
        left_out=tuple(left_out(timed)),
    )


def markdown_table(sets: Sequence[SetComposition]) -> str:
    """A row a set, and for each a table of what `min_kernel_share` would leave out, as Markdown."""
    parts: list[Part] = [table_of(sets, COLUMNS)]
    for each in sets:
        parts += [f"{each.name}:", table_of(each.left_out, LEFT_OUT_COLUMNS)]
    return markdown(*parts)


def _families(each: SetComposition) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in each.families.items())


COLUMNS: Mapping[str, Callable[[SetComposition], Cell]] = {
    "strategy": lambda each: each.name,
    "samples": lambda each: f"{each.samples:,}",
    "tasks": lambda each: f"{each.tasks:,}",
    "single": lambda each: f"{each.single_operator:,}",
    "fusion": lambda each: f"{each.fusion:,}",
    "tokens (median)": lambda each: number(each.median_tokens, ",.0f"),
    "speedup (median)": lambda each: (
        f"{interval(each.median_speedup, form='.2x')} (n {each.timed:,})"
    ),
    "families": _families,
}


def _median(values: pl.Series) -> float | None:
    median = values.median()
    return median if isinstance(median, float) else None
