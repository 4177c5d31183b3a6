"""Contents of training sets, as records and as one table. Every sample counts once, in one family
of its task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.records import Record
from tasks.operators import is_single_operator
from tasks.reporting.page import rendered
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
TABLE = Path(__file__).parent / "templates" / "composition.md.j2"
FIX = "give verdicts joined with the candidates they are of"


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
    """Content of a set: `rows` has a line per sample with task_id, reasoning_tokens, `speedup` or
    `timing`, and `operator_kind` or `reference_operators`; `families` has task_id and family.
    Raises UsageError for missing columns."""
    _require(rows, ("task_id", "reasoning_tokens"))
    singles = int(rows.select(_single(rows)).to_series().sum())
    tokens = _numbers(rows, "reasoning_tokens", pl.col("reasoning_tokens"))
    speedups = _numbers(rows, "speedup", _speedup(rows))
    return SetComposition(
        name=name,
        samples=rows.height,
        tasks=rows["task_id"].n_unique(),
        single_operator=singles,
        fusion=rows.height - singles,
        families=_families(rows, families),
        tokens=_quantiles(tokens),
        speedups=_quantiles(speedups.filter(speedups > 0)),
    )


def markdown(sets: Sequence[SetComposition]) -> str:
    return rendered(TABLE, sets=sets).strip() + "\n"


def _require(frame: pl.DataFrame, columns: Sequence[str]) -> None:
    if missing := [name for name in columns if name not in frame.columns]:
        raise UsageError(f"the figure needs the columns {', '.join(missing)}", FIX)


def _families(rows: pl.DataFrame, families: pl.DataFrame) -> dict[str, int]:
    _require(families, ("task_id", "family"))
    named = families.select(pl.col("task_id", "family").cast(pl.String))
    named = named.unique("task_id", keep="first")
    tasks = rows.select(pl.col("task_id").cast(pl.String))
    family = tasks.join(named, on="task_id", how="left")["family"].fill_null(UNKNOWN)
    return dict(by_count(dict(family.value_counts().iter_rows())))


def _single(rows: pl.DataFrame) -> pl.Expr:
    if "operator_kind" in rows.columns:
        return pl.col("operator_kind").cast(pl.String) == "single_operator"
    _require(rows, ("reference_operators",))
    return is_single_operator(pl.col("reference_operators"))


def _speedup(rows: pl.DataFrame) -> pl.Expr:
    if "speedup" in rows.columns:
        return pl.col("speedup")
    _require(rows, ("timing",))
    return nested(rows, "timing", "speedup")


def _numbers(rows: pl.DataFrame, name: str, column: pl.Expr) -> pl.Series:
    try:
        values = rows.select(column.cast(pl.Float64).alias(name)).to_series()
    except pl.exceptions.PolarsError as error:
        kind = rows.schema.get(name)
        raise UsageError(f"the column {name} holds {kind}, no numbers", FIX) from error
    return values.filter(values.is_finite().fill_null(False))


def _quantiles(values: pl.Series) -> Quantiles | None:
    if values.is_empty():
        return None
    found = {name: values.quantile(share, "linear") for name, share in QUANTILES.items()}
    return Quantiles(n=len(values), **found)
