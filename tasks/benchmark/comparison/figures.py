"""The figures of a comparison as SVG.

Guarantees: readable on light and dark; names are drawn as they are, never obeyed; a figure without
data is left out. Strategies are told apart by their place and their label, not by colour alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kernels_eval.records import Json
from tasks.benchmark.comparison.numbers import Arm, Compared
from tasks.benchmark.shown import FAST, label
from tasks.reporting.charts import (
    FIRST,
    INK,
    MUTED,
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

SCORES, SIZES = "scores", "sizes"
MOST_ARMS, NAME_CHARS = 40, 32
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
DASHES = ("-", "--", "-.", ":")
HOLLOW: Json = {
    **{"linestyle": "", "marker": "o", "markersize": 4},
    **{"markerfacecolor": "none", "color": INK, "alpha": 0.7},
}


@style()
def figures(found: Compared) -> dict[str, str]:
    """Return name -> SVG."""
    drawn: dict[str, str] = {}
    if not found.strategies:
        return drawn
    names = [arm.name for arm in found.strategies[:MOST_ARMS]] + list(found.references)
    figure, axes = new_figure(WIDTH, 0.9 + 0.3 * len(names), 1, 2, sharey=True)
    _plot_scores(axes, found, names)
    axes[1].tick_params(labelleft=False)
    drawn[SCORES] = svg_of(figure)
    if curves := _curves(found):
        figure, (only,) = new_figure(WIDTH, 3.4)
        _plot_sizes(only, found, curves)
        drawn[SIZES] = svg_of(figure)
    return drawn


def _plot_scores(every: Sequence[Axes], found: Compared, names: Sequence[str]) -> None:
    """A row for each model, best first, an axis for each metric."""
    for axes, metric in zip(every, (EXEC, FAST), strict=True):
        seeds = [_seeds(found, name, metric) for name in names]
        rows = [
            (*_percent(found, name, metric), MUTED if name in found.references else FIRST)
            for name in names
        ]
        point_rows(axes, [_short(name) for name in names], rows, size=6)
        for place, values in enumerate(seeds):
            axes.plot(values, [place + 0.26] * len(values), **HOLLOW)
        reference = _percent(found, found.baseline, metric)[0] if found.baseline else None
        if reference is not None and len(found.strategies) > 1:
            axes.axvline(reference, color=INK, linewidth=1, linestyle="--", alpha=0.7)
        drawn = [end for row in rows for end in row[:3] if end is not None]
        highest = max([*drawn, *itertools.chain(*seeds)], default=0.0)
        axes.set_xlim(0, min(102.0, max(5.0, 1.08 * highest)))
        labelled(axes, f"{label(metric)}@1, % of tasks", "", grid="both")


def _percent(
    found: Compared, name: str, metric: str
) -> tuple[float | None, float | None, float | None]:
    """A score with its bounds."""
    row = found.score(name, metric)
    numbers = (row["value"], row["lower"], row["upper"]) if row else (None, None, None)
    value, lower, upper = (None if each is None else 100 * each for each in numbers)
    return value, lower, upper


def _seeds(found: Compared, name: str, metric: str) -> list[float]:
    """Single seeds in percent, where there are several."""
    values = [100 * share for share in found.by_seed(name, metric)]
    return values if len(values) > 1 else []


def _curves(found: Compared) -> dict[str, list[Arm]]:
    """strategy -> its arms by the rows they were trained on, where there are several."""
    curves: dict[str, list[Arm]] = {branch.strategy: [] for branch in found.ablation.branches}
    for arm in sorted(found.strategies, key=_rows):
        if _rows(arm):
            curves[arm.strategy].append(arm)
    return {name: arms for name, arms in curves.items() if len(set(map(_rows, arms))) > 1}


def _rows(arm: Arm) -> float:
    """What was trained on; a size that was asked for may be more than there was."""
    return (arm.rows if arm.rows is not None else arm.size) or 0.0


def _plot_sizes(axes: Axes, found: Compared, curves: dict[str, list[Arm]]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    places = {_rows(arm) for arms in curves.values() for arm in arms}
    for number, (strategy, arms) in enumerate(curves.items()):
        colour = FIRST if number % 2 == 0 else MUTED
        # neighbours are set apart, so that their intervals do not lie on one another
        aside = 1 + 0.03 * (number - (len(curves) - 1) / 2)
        line: list[tuple[float, float | None]] = []
        for arm in arms:
            at, (value, lower, upper) = _rows(arm) * aside, _percent(found, arm.name, EXEC)
            line.append((at, value))
            if lower is not None and upper is not None:
                axes.vlines(at, lower, upper, color=colour, linewidth=1.2)
            seeds = _seeds(found, arm.name, EXEC)
            axes.plot([at] * len(seeds), seeds, **HOLLOW)
        axes.plot(
            *zip(*line, strict=True),
            label=_short(strategy),
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
    legend(axes, 3)


def _short(name: str) -> str:
    plain = clean(name, one_line=True)
    return plain if len(plain) <= NAME_CHARS else f"{plain[: NAME_CHARS - 1]}…"
