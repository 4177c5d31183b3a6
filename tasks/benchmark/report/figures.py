"""The figures of a report, as SVG text.

Guarantees: readable on light and dark; the same context gives the same bytes; no formula, link or
script of a label is obeyed; a figure without data is left out. Takes no part in pyplot's global
state.
"""

from __future__ import annotations

import itertools
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kernels_eval.records import Json, Status
from tasks.benchmark.report.content import (
    MAX_BARS,
    MAX_POINTS,
    TRACK,
    lengths_by_status,
    smallest_k,
    timed,
)
from tasks.benchmark.report.records import CandidatePoint, ProfilePoint, ReportContext
from tasks.benchmark.scoring import ScoreRow
from tasks.benchmark.tables import label
from tasks.reporting.charts import (
    FIRST,
    INK,
    LOOKS,
    MUTED,
    WIDTH,
    labelled,
    legend,
    new_figure,
    point_rows,
    ratios,
    style,
    svg_of,
)
from tasks.reporting.text import clean, cut, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCORES = {"scores": (WIDTH, 3.4, 1, 2), "scores.narrow": (3.9, 5.6, 2, 1)}
"""Width and height in inches, rows and columns of axes: for wide and for small screens."""
MARKERS = "os^Dv"


@style()
def figures(context: ReportContext) -> dict[str, str]:
    """Return name -> standalone SVG. A figure without data is left out."""
    drawn = {}
    if rows := [row for row in context.scores if row.track == TRACK and row.value is not None]:
        for name, (width, height, down, across) in SCORES.items():
            figure, axes = new_figure(width, height, down, across)
            _exec(axes[0], [row for row in rows if row.metric == "exec"])
            _fast(axes[1], [row for row in rows if row.k == smallest_k(rows)])
            drawn[name] = figure
    if context.losses:
        drawn["training_loss"] = _loss(context)
    if lengths := lengths_by_status(context):
        drawn["reasoning_length"] = _lengths(lengths)
    if points := spread(timed(context), MAX_BARS):
        drawn["speedup"] = _speedups(points)
    if placed := [point for point in context.profiles if point.intensity and point.reached]:
        drawn["roofline"] = _roofline(placed)
    return {name: svg_of(figure) for name, figure in drawn.items()}


def _exec(axes: Axes, rows: Sequence[ScoreRow]) -> None:
    names = [f"{_short(row.model)}, {label(row.metric, row.k)}" for row in rows]
    points = [(row.value, row.lower, row.upper, FIRST if row.value else MUTED) for row in rows]
    point_rows(axes, names, points, size=5)
    axes.set_xlim(0, 1)
    labelled(axes, "Exec, share of tasks", "", grid="both")


def _fast(axes: Axes, rows: Sequence[ScoreRow]) -> None:
    """A line for each model: fast_p over p, with its intervals set apart."""
    models = list(dict.fromkeys(row.model for row in rows))
    for number, (model, look) in enumerate(zip(models, itertools.cycle(LOOKS), strict=False)):
        line = [
            (float(row.metric.removeprefix("fast_")), row)
            for row in rows
            if row.model == model and row.metric.startswith("fast_")
        ]
        look_of: Json = {"color": look.colour, "linestyle": "--" if look.hatch else "-"}
        values = [(p, row.value) for p, row in line]
        axes.plot(*zip(*values, strict=True), marker=MARKERS[number % 5], markersize=4, **look_of)
        axes.lines[-1].set_label(_short(model))
        for p, row in line:
            if row.lower is not None and row.upper is not None:
                axes.vlines(
                    p + 0.012 * number, row.lower, row.upper, linewidth=1, alpha=0.6, **look_of
                )
    axes.set_ylim(0, 1)
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


def _roofline(points: Sequence[ProfilePoint]) -> Figure:
    """Where each candidate lies under the roof: a marker for each limit, and the roof in units of
    the arithmetic peak, of the device with the most candidates."""
    figure, (axes,) = new_figure(WIDTH, 3.4)
    ridges = [point.ridge for point in points if point.ridge]
    ridge = statistics.mode(ridges) if ridges else 1.0
    intensities = [point.intensity or 0.0 for point in points]
    low, high = min(*intensities, ridge) / 3, max(*intensities, ridge) * 3
    axes.plot([low, ridge, high], [low / ridge, 1, 1], color=INK, linewidth=1.4)
    axes.annotate("memory", (low, low / ridge), (0, 20), textcoords="offset points", color=INK)
    axes.annotate("arithmetic", (high, 1), (-62, 4), textcoords="offset points", color=INK)
    for number, limit in enumerate(dict.fromkeys(point.limit for point in points)):
        of = [point for point in points if point.limit == limit]
        xs = [point.intensity or 0.0 for point in of]
        roofs = [min(1.0, x / (point.ridge or ridge)) for x, point in zip(xs, of, strict=True)]
        ys = [roof * (point.reached or 0.0) for roof, point in zip(roofs, of, strict=True)]
        look: Json = {"color": FIRST if number % 2 == 0 else MUTED, "fillstyle": "none"}
        name = f"{limit.replace('_', ' ')} ({len(of)})"
        axes.plot(xs, ys, linestyle="", marker=MARKERS[number % 5], markersize=6, **look)
        axes.lines[-1].set_label(name)
    labelled(axes, "FLOPs a byte", "share of the arithmetic peak", grid="both")
    ratios(axes, "x")
    ratios(axes, "y")
    legend(axes, columns=3)
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
