"""Figures of the observations, drawn from their record and their samples.

Guarantees: what `charts` guarantees; how many samples are drawn is said under each. Where there is
nothing to draw, the figure says so in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kernels_eval.records import Json
from tasks.observe.observations import Observations
from tasks.reporting.charts import (
    FIRST,
    INK,
    SECOND,
    SIZE_INCHES,
    Drawn,
    caption,
    labelled,
    new_figure,
    note,
    style,
)
from tasks.reporting.text import interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DRAWN_FROM = 20
"""Samples under which the interval of a bin would cover half of the figure."""


def all_figures(found: Observations) -> list[Drawn]:
    """Return the figures of the observations, in the order of their page."""
    return [accuracy_figure(found), difficulty_figure(found)]


@style()
def accuracy_figure(found: Observations) -> Drawn:
    """The paper's figure 2: the share correct by reasoning length, with Wilson's intervals."""
    figure, (axes,) = new_figure(*SIZE_INCHES)
    labelled(axes, "reasoning length (tokens)", "share correct")
    full = [row for row in found.bins if row["samples"] >= DRAWN_FROM]
    places = [_middle(row) for row in full]
    _points(axes, places, full, "accuracy", FIRST)
    few = [row for row in found.bins if row["samples"] < DRAWN_FROM]
    accuracies = [row["accuracy"] for row in few]
    axes.plot([_middle(row) for row in few], accuracies, "o", color=FIRST, alpha=0.3, markersize=3)
    axes.set_ylim(0, 1)
    axes.set_xlim(left=0)
    caption(
        figure,
        f"n {found.samples:,} samples of {found.tasks:,} tasks, {found.correct:,} correct."
        f" Bars: 95 % Wilson intervals; pale: bins of fewer than {DRAWN_FROM} samples.",
    )
    shares = "; ".join(
        f"from {row['from_tokens']:,} tokens {interval(row['accuracy'], form='.0%')}"
        for row in full
    )
    alt = f"Share correct against reasoning length, with 95 % Wilson intervals: {shares}."
    return Drawn("accuracy-by-length", figure, alt)


@style()
def difficulty_figure(found: Observations) -> Drawn:
    """Exec and geometric-mean speedup of the thirds of the tasks by ARL."""
    figure, panels = new_figure(*SIZE_INCHES, columns=2)
    values = {"exec": "Exec (share correct)", "speedup": "geometric-mean speedup (a ratio)"}
    for axes, (name, title), colour in zip(panels, values.items(), (FIRST, SECOND), strict=True):
        labelled(axes, "thirds of the tasks by ARL", title)
        known = [row for row in found.thirds if row[name] is not None]
        if not known:
            note(axes, "none")
            continue
        names = [row["third"] for row in known]
        _points(axes, list(range(len(known))), known, name, colour, bounds=f"{name}_")
        axes.set_xticks(range(len(known)), names)
        axes.set_ylim(bottom=0)
    panels[1].axhline(1.0, color=INK, linewidth=1, linestyle=":")
    caption(figure, f"n {found.tasks:,} tasks. Bars: 95 % intervals over tasks.")
    thirds = "; ".join(
        f"{row['third']} (ARL {row['from_arl']:,.0f} to {row['to_arl']:,.0f}) Exec"
        f" {interval(row['exec'], form='.0%')}, speedup {interval(row['speedup'], form='.2x')}"
        for row in found.thirds
    )
    alt = f"Exec and speedup of thirds of the tasks by average length: {thirds or 'none'}."
    return Drawn("difficulty", figure, alt)


def _middle(row: Json) -> float:
    """The middle of a bin; where it is open, its start."""
    return float(row["from_tokens"] + (row["to_tokens"] or row["from_tokens"])) / 2


def _points(
    axes: Axes,
    places: Sequence[float],
    rows: Sequence[Json],
    name: str,
    colour: str,
    bounds: str = "",
) -> None:
    """Values with their intervals, joined; one without both bounds has no bar."""
    known = [(row[name], row[f"{bounds}lower"], row[f"{bounds}upper"]) for row in rows]
    values, lower, upper = np.array(known, dtype=float).reshape(-1, 3).T
    reach = np.nan_to_num(np.stack([values - lower, upper - values])).clip(0)
    axes.errorbar(places, values, reach, fmt="o-", capsize=3, markersize=4, color=colour)
