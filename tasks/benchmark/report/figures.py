"""A report's figures as SVG text. Figures without data are left out."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from kernels_eval.records import Json, Row
from tasks.benchmark.report.content import headline_scores, own_scores
from tasks.benchmark.report.context import ReportContext
from tasks.benchmark.shown import label
from tasks.reporting.charts import (
    FIRST,
    MUTED,
    SECOND,
    WIDTH,
    labelled,
    legend,
    new_figure,
    point_rows,
    style,
    svg_of,
)
from tasks.reporting.text import clean
from tasks.scores import EXEC

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "os^Dv"
LINES = tuple(zip(("-", "--", ":", "--", ":", "-"), 2 * (FIRST, SECOND, MUTED), strict=True))
"""Stroke and colour of a model's curve: two on one another are both seen."""
ASIDE = 0.02
"""Of a model's points from those of the model before it, in p."""


@style()
def figures(context: ReportContext) -> dict[str, str]:
    """Return name -> standalone SVG, if it has data."""
    drawn = {}
    if any(row["value"] is not None for row in headline_scores(context)):
        drawn["scores"] = _scores(context)
    if context.losses:
        drawn["training_loss"] = _loss(context)
    return {name: svg_of(figure) for name, figure in drawn.items()}


def _scores(context: ReportContext) -> Figure:
    rows = [row for row in own_scores(context) if row["value"] is not None]
    figure, (left, right) = new_figure(WIDTH, 2.6, 1, 2)
    execs = [row for row in rows if row["metric"] == EXEC]
    names = [f"{_short(row['model'])}, {label(EXEC, row['k'])}" for row in execs]
    points = [
        (row["value"], row["lower"], row["upper"], FIRST if row["value"] else MUTED)
        for row in execs
    ]
    point_rows(left, names, points, size=5)
    left.set_xlim(0, 1)
    labelled(left, "Exec, share of tasks", "", grid="both")
    smallest = min(row["k"] for row in execs)
    curves = [row for row in rows if row["metric"].startswith("fast_") and row["k"] == smallest]
    _fast(right, curves)
    return figure


def _fast(axes: Axes, rows: Sequence[Row]) -> None:
    models = list(dict.fromkeys(row["model"] for row in rows))
    for number, (model, (stroke, colour)) in enumerate(zip(models, cycle(LINES), strict=False)):
        own = [row for row in rows if row["model"] == model]
        aside = ASIDE * number
        places = [float(row["metric"].removeprefix("fast_")) + aside for row in own]
        line: Json = {"color": colour, "linestyle": stroke}
        values = [row["value"] for row in own]
        marker = MARKERS[number % len(MARKERS)]
        axes.plot(places, values, marker=marker, markersize=4, label=_short(model), **line)
        for p, row in zip(places, own, strict=True):
            axes.vlines(p, row["lower"], row["upper"], linewidth=1, alpha=0.6, **line)
    axes.set_ylim(-0.05, 1.05)  # a curve at 0 stands clear of the axis
    labelled(axes, "p (speedup above p)", "fast_p, share of tasks", grid="both")
    legend(axes)


def _short(model: str) -> str:
    return textwrap.shorten(clean(model, one_line=True), 20, placeholder="…")[:20]


def _loss(context: ReportContext) -> Figure:
    from matplotlib.ticker import MaxNLocator

    figure, (axes,) = new_figure(WIDTH, 2.6)
    logged = [(step.step, step.loss) for step in context.history if step.loss is not None]
    marker = "o" if len(logged) < 60 else ""
    axes.plot(*zip(*logged, strict=True), color=FIRST, marker=marker, markersize=3)
    labelled(axes, "optimiser step", "loss", grid="both")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure
