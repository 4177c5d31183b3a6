"""The figures of a report, as SVG text.

Guarantees: readable on light and dark; the same context gives the same bytes; no formula, link or
script of a label is obeyed; a figure without data is left out. Takes no part in pyplot's global
state.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kernels_eval.records import Status
from tasks.benchmark.report.records import CandidatePoint, ReportContext
from tasks.benchmark.report.sections import MAX_BARS, MAX_POINTS
from tasks.benchmark.report.summary import lengths_by_status, timed
from tasks.reporting.charts import FIRST, INK, MUTED, labelled, new_figure, ratios, style, svg_of
from tasks.reporting.text import clean, cut, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 7.4  # inches


def figures(context: ReportContext) -> dict[str, str]:
    """Return name -> standalone SVG. A figure without data is left out."""
    drawn = {}
    if context.losses:
        drawn["training_loss"] = _draw(2.6, lambda axes: _plot_loss(axes, context))
    if lengths := lengths_by_status(context):
        height = 1.0 + 0.45 * len(lengths)
        drawn["reasoning_length"] = _draw(height, lambda axes: _plot_lengths(axes, lengths))
    if points := spread(timed(context), MAX_BARS):
        height = 1.0 + 0.22 * len(points)
        drawn["speedup"] = _draw(height, lambda axes: _plot_speedups(axes, points))
    return drawn


@style()
def _draw(height: float, plot: Callable[[Axes], None]) -> str:
    figure, (axes,) = new_figure(WIDTH, height)
    plot(axes)
    return svg_of(figure)


def _plot_loss(axes: Axes, context: ReportContext) -> None:
    from matplotlib.ticker import MaxNLocator

    logged = [(step.step, step.loss) for step in context.history if step.loss is not None]
    axes.plot(
        [step for step, _ in logged],
        [loss for _, loss in logged],
        color=FIRST,
        marker="o" if len(logged) < 60 else "",
        markersize=3,
    )
    labelled(axes, "optimiser step", "loss", grid="both")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)


def _plot_lengths(axes: Axes, lengths: Mapping[str, Sequence[int]]) -> None:
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
    axes.set_yticks(
        range(len(lengths)),
        [f"{cut(clean(status, one_line=True), 30)} ({len(v):,})" for status, v in lengths.items()],
    )
    axes.set_ylim(len(lengths) - 0.5, -0.5)
    axes.set_xlim(left=0)
    labelled(axes, "reasoning length, tokens", "", grid="both")


def _plot_speedups(axes: Axes, points: Sequence[CandidatePoint]) -> None:
    rows = range(len(points))
    for row, point in zip(rows, points, strict=True):
        colour = FIRST if point.lower is not None and point.lower > 1 else MUTED
        if point.lower is not None and point.upper is not None:
            axes.hlines(row, point.lower, point.upper, color=colour, linewidth=1.6)
        axes.plot([point.speedup or 0.0], [row], marker="o", markersize=4, color=colour)
    axes.axvline(1.0, color=INK, linewidth=1, linestyle="--")
    axes.set_yticks(rows, [clean(point.task_name, one_line=True)[:36] for point in points])
    axes.set_ylim(len(points) - 0.5, -0.5)
    labelled(axes, "speedup (reference time / candidate time)", "", grid="both")
    speeds = [point.speedup for point in points if point.speedup]
    if max(speeds) > 10 * min(speeds):
        ratios(axes, "x")
    else:
        axes.set_xlim(left=0)
