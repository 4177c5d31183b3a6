"""The figures of a report, as SVG text.

Guarantees: readable on light and dark; the same context gives the same bytes; no formula, link or
script of a label is obeyed; a figure without data is left out. Takes no part in pyplot's global
state.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kernels_eval.records import Status
from tasks.benchmark.report.content import MAX_BARS, MAX_POINTS, lengths_by_status, timed
from tasks.benchmark.report.records import CandidatePoint, ReportContext
from tasks.reporting.charts import (
    FIRST,
    INK,
    MUTED,
    WIDTH,
    labelled,
    new_figure,
    point_rows,
    ratios,
    style,
    svg_of,
)
from tasks.reporting.text import clean, cut, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@style()
def figures(context: ReportContext) -> dict[str, str]:
    """Return name -> standalone SVG. A figure without data is left out."""
    drawn = {}
    if context.losses:
        drawn["training_loss"] = _loss(context)
    if lengths := lengths_by_status(context):
        drawn["reasoning_length"] = _lengths(lengths)
    if points := spread(timed(context), MAX_BARS):
        drawn["speedup"] = _speedups(points)
    return {name: svg_of(figure) for name, figure in drawn.items()}


def _loss(context: ReportContext) -> Figure:
    from matplotlib.ticker import MaxNLocator

    figure, (axes,) = new_figure(WIDTH, 2.6)
    logged = [(step.step, step.loss) for step in context.history if step.loss is not None]
    marker = "o" if len(logged) < 60 else ""
    axes.plot(*zip(*logged, strict=True), color=FIRST, marker=marker, markersize=3)
    labelled(axes, "optimiser step", "loss", grid="both")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    return figure


def _lengths(lengths: Mapping[str, Sequence[int]]) -> Figure:
    figure, (axes,) = new_figure(WIDTH, 1.0 + 0.45 * len(lengths))
    total = sum(map(len, lengths.values()))
    for row, (status, values) in enumerate(lengths.items()):
        shown = spread(values, max(2, MAX_POINTS * len(values) // total))
        # neighbours in length are set apart by their rank, the same way every time
        heights = [row + 0.12 * (rank % 5 - 2) for rank in range(len(shown))]
        colour = FIRST if status == Status.CORRECT else MUTED
        axes.plot(
            shown, heights, linestyle="", marker="o", markersize=3.5, alpha=0.65, color=colour
        )
        axes.vlines(statistics.median(values), row - 0.38, row + 0.38, color=INK, linewidth=1.6)
    names = [f"{cut(clean(name, one_line=True), 30)} ({len(v):,})" for name, v in lengths.items()]
    point_rows(axes, names)
    axes.set_xlim(left=0)
    labelled(axes, "reasoning length, tokens", "", grid="both")
    return figure


def _speedups(points: Sequence[CandidatePoint]) -> Figure:
    figure, (axes,) = new_figure(WIDTH, 1.0 + 0.22 * len(points))
    rows = [
        (
            *(each.speedup, each.lower, each.upper),
            FIRST if each.lower is not None and each.lower > 1 else MUTED,
        )
        for each in points
    ]
    point_rows(axes, [clean(each.task_name, one_line=True)[:36] for each in points], rows)
    axes.axvline(1.0, color=INK, linewidth=1, linestyle="--")
    labelled(axes, "speedup (reference time / candidate time)", "", grid="both")
    speeds = [each.speedup for each in points if each.speedup]
    if max(speeds) > 10 * min(speeds):
        ratios(axes, "x")
    else:
        axes.set_xlim(left=0)
    return figure
