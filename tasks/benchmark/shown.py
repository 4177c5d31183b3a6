"""Scores as rows and columns of text, for the report of a run and the comparison of an ablation.

Guarantees: a share has its interval beside it; what could not be estimated is "n/a", never 0.
Strings are raw: `tasks.reporting.page` escapes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from kernels_eval.records import Row
from tasks.reporting.page import Table
from tasks.reporting.text import interval
from tasks.scores import EXEC, GEOMETRIC_MEAN, metric_name

TEMPLATES = Path(__file__).parent / "templates"
TRACK_NAMES = {"any": "any correct", "custom_kernel": "custom kernel"}
FAST = metric_name(1.0)
HEADLINE_METRICS = (EXEC, FAST, GEOMETRIC_MEAN)
LABELS = {EXEC: "Exec", GEOMETRIC_MEAN: "speedup of correct"}
FEW_TASKS = 30
"""Below it, an interval of a share is wider than most differences between models."""


class Caution(NamedTuple):
    """One thing that limits a result: what it is, its value here, and what that means."""

    what: str
    value: str
    means: str


def cautions_of(*found: tuple[str, object, str]) -> list[Caution]:
    """The cautions whose value is not empty."""
    return [Caution(what, str(value), means) for what, value, means in found if value]


def label(metric: str, k: int | None = None) -> str:
    """A metric's name: `Exec@1`, `fast_1@5`, `speedup of correct`."""
    return LABELS.get(metric, metric) + (f"@{k}" if k is not None else "")


def scored(row: Row | None) -> str:
    """A score with its interval: a ratio for speedups, else percent; `n/a` without one."""
    if row is None:
        return "n/a"
    form = ".2x" if row["metric"] == GEOMETRIC_MEAN else ".1%"
    return interval(row["value"], row["lower"], row["upper"], form)


def difference_points(row: Row) -> str:
    """A difference in percentage points with its interval."""
    note = "" if row["lower"] is not None else " (no interval: all tasks differ alike)"
    return interval(row["difference"], row["lower"], row["upper"], "+.1p") + note


def pivoted(
    names: Iterable[str],
    rows: Iterable[Any],
    row_of: Callable[[Any], tuple[str, ...]],
    column_of: Callable[[Any], str] = lambda row: label(row["metric"], row["k"]),
    cell_of: Callable[[Any], str] = scored,
    absent: str = "n/a",
    first: Iterable[str] = (),
) -> Table:
    """A table whose rows and columns are in the order in which they appear.

    `names` are the header of what `row_of` returns, `first` the columns that stand first.
    """
    columns = dict.fromkeys(first)
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        columns[column_of(row)] = None
        found.setdefault(row_of(row), {})[column_of(row)] = cell_of(row)
    cells = [(*key, *(own.get(name, absent) for name in columns)) for key, own in found.items()]
    return Table((*names, *columns), cells, len(cells[0]) - len(columns) if cells else 0)
