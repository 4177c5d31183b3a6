"""The figures of a report, as SVG text.

Guarantees: readable on light and dark; the same context gives the same bytes; no formula, link or
script of a label is obeyed; a figure without data is left out. Takes no part in pyplot's global
state.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kernels_eval.records import Status
from tasks.reporting.numbers import lengths_by_status, timed
from tasks.reporting.records import CandidatePoint, ReportContext
from tasks.reporting.sections import MAX_BARS, MAX_POINTS
from tasks.reporting.text import clean, cut, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 7.4  # inches
INK = (  # drawn where the page's own text colour belongs; replaced by currentColor afterwards
    "#010203"
)
ACCENT, MUTED = "#1f9e89", "#8a8f98"  # both have contrast on white and on near-black
_SVG_STYLE = (
    "<style>svg{color:#1d2126}@media(prefers-color-scheme:dark){svg{color:#dfe3e8}}</style>"
)


def figures(context: ReportContext) -> dict[str, str]:
    """name -> standalone SVG, readable on light and dark. A figure without data is left out."""
    drawn = {}
    if context.losses:
        drawn["training_loss"] = _draw(2.6, lambda axes: _plot_loss(axes, context))
    lengths = lengths_by_status(context)
    if lengths:
        drawn["reasoning_length"] = _draw(
            1.0 + 0.45 * len(lengths), lambda axes: _plot_lengths(axes, lengths)
        )
    points = timed(context)
    if points:
        shown = spread(points, MAX_BARS)
        drawn["speedup"] = _draw(1.0 + 0.22 * len(shown), lambda axes: _plot_speedups(axes, shown))
    return drawn


def _draw(height: float, plot: Callable[[Axes], None]) -> str:
    return draw(WIDTH, height, lambda axes: plot(axes[0]))


def draw(
    width: float,
    height: float,
    plot: Callable[[Sequence[Axes]], None],
    *,
    rows: int = 1,
    columns: int = 1,
    sharey: bool = False,
) -> str:
    """Draw on `rows` times `columns` bare axes (row by row) of a figure in inches, and return SVG
    text.

    Colours: INK becomes the page's own text colour; ACCENT and MUTED have contrast on white and on
    near-black.
    """
    import matplotlib
    from matplotlib.figure import Figure

    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": "concur",
        "text.parse_math": False,
        "font.family": "sans-serif",
        "font.size": 9,
    }
    settings |= dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
    )
    settings |= {"axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(width, height), layout="constrained")
        every = list(figure.subplots(rows, columns, squeeze=False, sharey=sharey).flat)
        for axes in every:
            axes.grid(True, color=INK, alpha=0.12, linewidth=0.6)
            axes.set_axisbelow(True)
        plot(every)
        buffer = io.StringIO()
        figure.savefig(
            buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    svg = buffer.getvalue()
    return (
        svg[svg.index("<svg") :]
        .replace(INK, "currentColor")
        .replace("<defs>", f"{_SVG_STYLE}<defs>", 1)
    )


def _plot_loss(axes: Axes, context: ReportContext) -> None:
    from matplotlib.ticker import MaxNLocator

    logged = [step for step in context.history if step.loss is not None]
    axes.plot(
        [s.step for s in logged],
        [s.loss for s in logged],
        color=ACCENT,
        marker="o" if len(logged) < 60 else "",
        markersize=3,
    )
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)


def _plot_lengths(axes: Axes, lengths: Mapping[str, Sequence[int]]) -> None:
    total = sum(map(len, lengths.values()))
    for row, (status, values) in enumerate(lengths.items()):
        shown = spread(values, max(2, MAX_POINTS * len(values) // total))
        # neighbours in length are set apart by their rank, the same way every time
        heights = [row + 0.12 * (rank % 5 - 2) for rank in range(len(shown))]
        colour = ACCENT if status == Status.CORRECT else MUTED
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
    axes.set_xlabel("reasoning length, tokens")


def _plot_speedups(axes: Axes, points: Sequence[CandidatePoint]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    rows = range(len(points))
    for row, point in zip(rows, points, strict=True):
        colour = ACCENT if point.lower is not None and point.lower > 1 else MUTED
        if point.lower is not None and point.upper is not None:
            axes.hlines(row, point.lower, point.upper, color=colour, linewidth=1.6)
        axes.plot([point.speedup], [row], marker="o", markersize=4, color=colour)
    axes.axvline(1.0, color=INK, linewidth=1, linestyle="--")
    axes.set_yticks(rows, [clean(point.task_name, one_line=True)[:36] for point in points])
    axes.set_ylim(len(points) - 0.5, -0.5)
    axes.set_xlabel("speedup (reference time / candidate time)")
    speeds = [point.speedup for point in points if point.speedup]
    if max(speeds) > 10 * min(speeds):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(left=0)
