"""Scores as rows and columns of text, for the report of a run and the comparison of an ablation.

Guarantees: a rate has its interval beside it; what could not be estimated is "n/a", never 0.
Strings are raw: `tasks.reporting.page` escapes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from kernels_eval.tables import table_beside
from tasks.benchmark.comparing import ComparisonRow, metric_name
from tasks.benchmark.scoring import GEOMETRIC_MEAN, ScoreRow
from tasks.reporting.page import Table, filled
from tasks.reporting.text import interval

TEMPLATES = Path(__file__).parent / "templates"
TRACK_NAMES = {"any": "any correct", "custom_kernel": "custom kernel"}
HEAD_METRICS = ("exec", metric_name(1.0))
LABELS = {"exec": "Exec", GEOMETRIC_MEAN: "speedup of correct"}
FEW_TASKS = 30  # below it, an interval of a rate is wider than most differences between models
PAPER = "ConCuR, arXiv 2510.07356"
PUBLISHED: list[dict[str, object]] = (
    pl.read_csv(Path(__file__).with_name("published.csv"))
    .with_columns(source=pl.lit(PAPER), quoted=True)
    .to_dicts()
)
"""The paper's main table, then its second base model before and after: shares in [0, 1], as reviews
of the paper quote them. They are of KernelBench levels 1 and 2 on an RTX 5090 under KernelBench's
own harness and tolerance, on the track "any"."""


class Caveat(NamedTuple):
    """One thing that limits a result: what it is, its value here, and what that means."""

    what: str
    value: str
    means: str


def caveats_of(words: str, **known: object) -> list[Caveat]:
    """Return the caveats of the file `words` whose value, a template of what is `known`, is not
    empty."""
    rows = table_beside(__file__, f"templates/{words}").values()
    found = (Caveat(**row | {"value": filled(row["value"], **known)}) for row in rows)
    return [caveat for caveat in found if caveat.value]


def label(metric: str, k: int | None = None) -> str:
    """Return a metric's name: `Exec@1`, `fast_1@5`, `speedup of correct`."""
    return LABELS.get(metric, metric) + (f"@{k}" if k is not None else "")


def scored(row: ScoreRow | None) -> str:
    """Return a score with its interval: a ratio for speedups, else percent; `n/a` without one."""
    if row is None:
        return "n/a"
    form = ".2x" if row.metric.startswith((GEOMETRIC_MEAN, "speedup_q")) else ".1%"
    return interval(row.value, row.lower, row.upper, form)


def difference_points(row: ComparisonRow) -> str:
    """Return a difference in percentage points with its interval."""
    note = "" if row.lower is not None else " (no interval: all tasks differ alike)"
    return interval(row.difference, row.lower, row.upper, "+.1p") + note


def pivoted(
    names: Iterable[str],
    rows: Iterable[Any],
    row_of: Callable[[Any], tuple[str, ...]],
    column_of: Callable[[Any], str] = lambda row: label(row.metric, row.k),
    cell_of: Callable[[Any], str] = scored,
    absent: str = "n/a",
    first: Iterable[str] = (),
) -> Table:
    """Return a table whose rows and columns are in the order in which they appear.

    `names` are the header of what `row_of` returns, `first` the columns that stand first.
    """
    columns = dict.fromkeys(first)
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        columns[column_of(row)] = None
        found.setdefault(row_of(row), {})[column_of(row)] = cell_of(row)
    cells = [(*key, *(own.get(name, absent) for name in columns)) for key, own in found.items()]
    return Table((*names, *columns), cells, len(cells[0]) - len(columns) if cells else 0)


def published_table() -> Table:
    """PUBLISHED in percent. "(r)" marks what is as quoted by reviews."""
    return pivoted(
        ("model",),
        PUBLISHED,
        lambda row: (f"{row['model']} (r)" if row["quoted"] else row["model"],),
        lambda row: f"L{row['level']} {label(row['metric'], row['k'])}",
        lambda row: f"{100 * row['value']:.0f}",
        absent="",
    )
