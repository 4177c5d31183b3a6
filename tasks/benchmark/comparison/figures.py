"""A comparison's SVG figure: scores of strategies with intervals and seeds. Without data there is
none."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kernels_eval.records import Json
from tasks.benchmark.comparison.numbers import Compared
from tasks.benchmark.shown import FAST, OWN_TRACK, label
from tasks.reporting.charts import (
    FIRST,
    INK,
    MUTED,
    WIDTH,
    labelled,
    new_figure,
    point_rows,
    style,
    svg_of,
)
from tasks.reporting.text import clean
from tasks.scores import EXEC

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCORES = "scores"
MOST_ARMS, NAME_CHARS = 40, 32
HOLLOW: Json = {
    "linestyle": "",
    "marker": "o",
    "markersize": 4,
    "markerfacecolor": "none",
    "color": INK,
    "alpha": 0.7,
}


@style()
def figures(found: Compared) -> dict[str, str]:
    if not found.strategies:
        return {}
    rows = [*found.strategies[:MOST_ARMS], *found.references]
    figure, axes = new_figure(WIDTH, 0.9 + 0.3 * len(rows), 1, 2, sharey=True)
    for place, metric in zip(axes, (EXEC, FAST), strict=True):
        _plot_metric(place, found, rows, metric)
    axes[1].tick_params(labelleft=False)
    return {SCORES: svg_of(figure)}


def _plot_metric(axes: Axes, found: Compared, rows: Sequence[Json], metric: str) -> None:
    points = []
    for row in rows:
        values = [row[f"{metric}_at_1{end}"] for end in ("", "_lower", "_upper")]
        value, lower, upper = (None if each is None else 100 * each for each in values)
        points.append((value, lower, upper, FIRST if row["strategy"] else MUTED))
    seeds = [_seeds(found, row["name"], metric) for row in rows]
    point_rows(axes, [_short(row["name"]) for row in rows], points, size=6)
    for place, shares in enumerate(seeds):
        axes.plot(shares, [place + 0.26] * len(shares), **HOLLOW)
    baseline = [
        point[0]
        for row, point in zip(rows, points, strict=True)
        if row["strategy"] == found.baseline
    ]
    if len(found.strategies) > 1 and baseline and baseline[0] is not None:
        axes.axvline(baseline[0], color=INK, linewidth=1, linestyle="--", alpha=0.7)
    drawn = [end for point in points for end in point[:3] if end is not None]
    highest = max([*drawn, *itertools.chain(*seeds)], default=0.0)
    axes.set_xlim(0, min(102.0, max(5.0, 1.08 * highest)))
    labelled(axes, f"{label(metric)}@1, % of tasks", "", grid="both")


def _seeds(found: Compared, name: str, metric: str) -> list[float]:
    values = [
        100 * row["value"]
        for row in found.scores_by_seed
        if (row["arm"], row["metric"], row["track"]) == (name, metric, OWN_TRACK)
    ]
    return values if len(values) > 1 else []


def _short(name: str) -> str:
    plain = clean(name, one_line=True)
    return plain if len(plain) <= NAME_CHARS else f"{plain[: NAME_CHARS - 1]}…"
