"""The figures of a comparison as SVG, each for wide and for small screens.

Guarantees: readable on light and dark; names are drawn as they are, never obeyed; a figure without
data is left out. Strategies are told apart by their place and their label, not by colour alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tasks.benchmark.comparison.numbers import EXEC, FAST, Arm, Compared
from tasks.benchmark.comparison.sections import SCORES, SIZES
from tasks.benchmark.report.figures import WIDTH
from tasks.benchmark.report.summary import label
from tasks.reporting.charts import FIRST, INK, MUTED, labelled, legend, new_figure, style, svg_of
from tasks.reporting.text import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes


NARROW = 3.9  # inches: at the width of a telephone its text is as large as the page's
MOST_ARMS = 40
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
DASHES = ("-", "--", "-.", ":")


@style()
def figures(found: Compared) -> dict[str, str]:
    """Return name -> SVG, and "NAME.narrow" -> SVG."""
    drawn: dict[str, str] = {}
    if not found.arms:
        return drawn
    names = [arm.name for arm in found.arms[:MOST_ARMS]] + list(found.references)
    height = 0.9 + 0.3 * len(names)
    figure, axes = new_figure(WIDTH, height, columns=2, sharey=True)
    _plot_scores(axes, found, names, 32, shared=True)
    drawn[SCORES] = svg_of(figure)
    figure, axes = new_figure(NARROW, 2 * height, rows=2)
    _plot_scores(axes, found, names, 24, shared=False)
    drawn[f"{SCORES}.narrow"] = svg_of(figure)
    if curves := _curves(found):
        for name, width, tall, columns in (
            (SIZES, WIDTH, 3.4, 3),
            (f"{SIZES}.narrow", NARROW, 3.6, 1),
        ):
            figure, axes = new_figure(width, tall)
            _plot_sizes(axes[0], found, curves, columns=columns)
            drawn[name] = svg_of(figure)
    return drawn


def _plot_scores(
    every: Sequence[Axes], found: Compared, names: Sequence[str], characters: int, *, shared: bool
) -> None:
    """A row for each model, best first, an axis for each metric."""
    for axes, metric in zip(every, (EXEC, FAST), strict=True):
        highest = 0.0
        for place, name in enumerate(names):
            row = found.score(name, metric)
            seeds = _hollow(axes, found.by_seed(name, metric), place + 0.26)
            colour = MUTED if name in found.references else FIRST
            if row is not None and row.value is not None:
                ends = [100 * end for end in (row.lower, row.upper) if end is not None]
                if len(ends) == 2:
                    axes.hlines(place, ends[0], ends[1], color=colour, linewidth=2)
                # whole at 0 too
                look: dict[str, Any] = {"markersize": 6, "color": colour, "clip_on": False}
                axes.plot([100 * row.value], [place], marker="o", **look)
                highest = max(highest, 100 * row.value, *ends, *seeds)
        reference = found.score(found.baseline, metric) if found.baseline else None
        if reference is not None and reference.value is not None and len(found.arms) > 1:
            axes.axvline(100 * reference.value, color=INK, linewidth=1, linestyle="--", alpha=0.7)
        axes.set_yticks(range(len(names)), [_short(name, characters) for name in names])
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlim(0, min(102.0, max(5.0, 1.08 * highest)))
        labelled(axes, f"{label(metric)}@1, % of tasks", "", grid="both")
    if shared:
        every[1].tick_params(labelleft=False)


def _hollow(
    axes: Axes, shares: Sequence[float], place: float, *, upright: bool = False
) -> list[float]:
    """Single seeds, in percent; returned where there are several."""
    seeds = [100 * share for share in shares]
    if len(seeds) < 2:
        return []
    at = [place] * len(seeds)
    look: dict[str, Any] = {"markerfacecolor": "none", "color": INK, "alpha": 0.7}
    first, second = (at, seeds) if upright else (seeds, at)
    axes.plot(first, second, linestyle="", marker="o", markersize=4, **look)
    return seeds


def _curves(found: Compared) -> dict[str, list[Arm]]:
    """strategy -> its arms by the rows they were trained on, where there are several."""
    curves: dict[str, list[Arm]] = {}
    for arm in sorted(found.arms, key=lambda arm: _rows(arm) or 0.0):
        if _rows(arm) is not None:
            curves.setdefault(arm.strategy, []).append(arm)
    order = dict.fromkeys(branch.strategy for branch in found.ablation.branches)
    return {
        name: curves[name]
        for name in order
        if len({_rows(arm) for arm in curves.get(name, ())}) > 1
    }


def _rows(arm: Arm) -> float | None:
    """What was trained on; a size that was asked for may be more than there was."""
    return arm.rows if arm.rows is not None else arm.size


def _plot_sizes(axes: Axes, found: Compared, curves: dict[str, list[Arm]], *, columns: int) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    places: set[float] = set()
    for number, (strategy, arms) in enumerate(curves.items()):
        colour = FIRST if number % 2 == 0 else MUTED
        # neighbours are set apart, so that their intervals do not lie on one another
        aside = 1 + 0.03 * (number - (len(curves) - 1) / 2)
        line: list[tuple[float, float]] = []
        for arm in arms:
            rows, row = _rows(arm), found.score(arm.name, EXEC)
            if not rows or row is None or row.value is None:
                continue
            places.add(rows)
            line.append((rows * aside, 100 * row.value))
            if row.lower is not None and row.upper is not None:
                ends = (100 * row.lower, 100 * row.upper)
                axes.vlines(rows * aside, *ends, color=colour, linewidth=1.2)
            _hollow(axes, found.by_seed(arm.name, EXEC), rows * aside, upright=True)
        axes.plot(
            *zip(*line, strict=True),
            label=_short(strategy, 28),
            color=colour,
            linestyle=DASHES[number // 2 % len(DASHES)],
            marker=MARKERS[number % len(MARKERS)],
            markersize=6,
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sorted(places)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0)
    labelled(axes, "rows trained on", "Exec@1, % of tasks", grid="both")
    legend(axes, columns)


def _short(name: str, characters: int) -> str:
    plain = clean(name, one_line=True)
    return plain if len(plain) <= characters else f"{plain[: characters - 1]}…"
