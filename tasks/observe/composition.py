"""Contents of training sets, as records and as one table. Every sample counts once, in one family
of its task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import polars as pl

from kernels_eval.records import Record
from tasks.operators import is_single_operator
from tasks.reporting.page import markdown
from tasks.reporting.parts import Cell, table_of
from tasks.reporting.text import by_count
from tasks.scores import nested

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
QUANTILES = {"p10": 0.1, "p25": 0.25, "median": 0.5, "p75": 0.75, "p90": 0.9}


class Quantiles(Record):
    """Of `n` values: tokens, or speedups (ratios)."""

    n: int
    p10: float
    p25: float
    median: float
    p75: float
    p90: float


class SetComposition(Record):
    """Content of one training set. `families` counts samples, the most frequent first; `tokens` and
    `speedups` are None without any."""

    name: str
    samples: int
    tasks: int
    single_operator: int
    fusion: int
    families: dict[str, int]
    tokens: Quantiles | None
    speedups: Quantiles | None


def leading_family(families: Sequence[str]) -> str:
    """The family that stands for a task: its first in LEADING, else the first given, else
    UNKNOWN."""
    return next((name for name in (*LEADING, *families) if name in families), UNKNOWN)


def composition(name: str, rows: pl.DataFrame, families: pl.DataFrame) -> SetComposition:
    """Content of a set: `rows` has a line per sample with task_id, reasoning_tokens, timing and
    reference_operators; `families` has task_id and family."""
    tasks = rows.select(pl.col("task_id").cast(pl.String))
    family = tasks.join(families, on="task_id", how="left")["family"].fill_null(UNKNOWN)
    singles = int(rows.select(is_single_operator(pl.col("reference_operators")).sum()).item())
    speedups = rows.select(nested(rows, "timing", "speedup")).to_series()
    return SetComposition(
        name=name,
        samples=rows.height,
        tasks=rows["task_id"].n_unique(),
        single_operator=singles,
        fusion=rows.height - singles,
        families=dict(by_count(dict(family.value_counts().iter_rows()))),
        tokens=_quantiles(rows["reasoning_tokens"]),
        speedups=_quantiles(speedups),
    )


def markdown_table(sets: Sequence[SetComposition]) -> str:
    """The table as Markdown, a row a set."""
    return markdown(table_of(sets, COLUMNS))


def _families(each: SetComposition) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in each.families.items())


COLUMNS: Mapping[str, Callable[[SetComposition], Cell]] = {
    "strategy": lambda each: each.name,
    "samples": lambda each: f"{each.samples:,}",
    "tasks": lambda each: f"{each.tasks:,}",
    "single": lambda each: f"{each.single_operator:,}",
    "fusion": lambda each: f"{each.fusion:,}",
    "tokens (median)": lambda each: f"{each.tokens.median:,.0f}" if each.tokens else "",
    "speedup (median)": lambda each: (
        f"{each.speedups.median:.2f} (n {each.speedups.n:,})" if each.speedups else "none"
    ),
    "families": _families,
}


def _quantiles(values: pl.Series) -> Quantiles | None:
    """Of finite values above 0."""
    known = values.cast(pl.Float64)
    known = known.filter(known.is_finite() & (known > 0))
    if known.is_empty():
        return None
    found = {name: known.quantile(share, "linear") for name, share in QUANTILES.items()}
    return Quantiles(n=len(known), **found)
