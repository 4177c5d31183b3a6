"""Figures of the observations and of difficulty, drawn from their records.

Guarantees: what `charts` guarantees; what a colour says, a shape or a label says too; how many
samples and tasks are drawn is said under each. Does not guarantee that a figure is there: where a
record holds nothing to draw, it says so in words. The words are templates/NAME.txt.j2: the caption,
and after a line of dashes the text for those who cannot see the figure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kernels_eval.records import Json
from tasks.analysis.records import Bin, Difficulty, Observations
from tasks.reporting.charts import (
    FIRST,
    INK,
    SECOND,
    SIZE_INCHES,
    Drawn,
    caption,
    labelled,
    legend,
    new_figure,
    note,
    ratios,
    style,
)
from tasks.reporting.page import rendered

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TEMPLATES = Path(__file__).parent / "templates"
LENGTH_LABEL = "reasoning length (tokens)"
MOST_STEPS = 8  # of a distribution of very few samples
ENOUGH_SAMPLES = 2000  # for bins as they are
FULL_BIN = 20  # samples under which the interval of a fixed bin would cover half of the figure

Point = tuple[float, float, float | None, float | None]
"""Place, value and its bounds."""


def all_figures(observations: Observations, difficulty: Difficulty) -> list[Drawn]:
    """Return the figures of an analysis, in the order of its page."""
    drawn = [
        draw(observations) for draw in (accuracy_by_length, lengths_by_outcome, speedup_by_length)
    ]
    return [*drawn, difficulty_curves(difficulty)]


def described(name: str, figure: Figure, **values: object) -> Drawn:
    """Return the figure with its caption and description, from the template of its name."""
    said = rendered(TEMPLATES / f"{name}.txt.j2", **values)
    under, alt = (" ".join(part.split()) for part in said.split("\n---\n", 1))
    if under:
        caption(figure, under)
    return Drawn(name, figure, alt)


@style()
def accuracy_by_length(found: Observations) -> Drawn:
    """The paper's figure 2: accuracy in tenths of the samples by length with Wilson intervals, and
    the fixed bins as dots."""
    figure, (axes,) = new_figure(*SIZE_INCHES)
    labelled(axes, LENGTH_LABEL, "share correct")
    tenths = found.everything.tenths
    for each in found.everything.bins:
        end = each.to_tokens or max(each.from_tokens, tenths[-1].to_tokens or 0.0)
        axes.plot(
            (each.from_tokens + end) / 2,
            each.accuracy,
            "o",
            color=FIRST,
            alpha=0.55 if each.samples >= FULL_BIN else 0.25,
            markersize=min(9.0, 2 + math.sqrt(each.samples) / 3),
        )
    _bars(axes, _middles(tenths), "o-", FIRST, "all samples, tenths")
    if found.complete is not None:
        _bars(axes, _middles(found.complete.tenths), "s-", SECOND, "without those cut off")
    axes.set_ylim(0, max(0.1, min(1.0, 1.15 * max(each.upper for each in tenths))))
    axes.set_xlim(left=0)
    legend(axes)
    return described("accuracy-by-length", figure, found=found)


@style()
def lengths_by_outcome(found: Observations) -> Drawn:
    """Distributions of length of correct and of incorrect samples, each summing to 1, over the
    fixed bins, or several of them together where samples are so few that each bin would hold a
    handful."""
    figure, (axes,) = new_figure(*SIZE_INCHES)
    labelled(axes, LENGTH_LABEL, "share of the outcome's samples in a bin")
    shown = found.everything
    spreads = {"correct": shown.correct_lengths, "incorrect": shown.incorrect_lengths}
    fewest = min(spread.samples for spread in spreads.values() if spread)
    together = 1
    if fewest < ENOUGH_SAMPLES:
        together = math.ceil(len(shown.bins) / max(MOST_STEPS, 2 * math.sqrt(fewest)))
    for (name, spread), colour, line in zip(
        spreads.items(), (FIRST, SECOND), ("-", "--"), strict=True
    ):
        if spread is None:
            continue
        right = name == "correct"
        counts = [each.correct if right else each.samples - each.correct for each in shown.bins]
        heights, edges = _filled(shown.bins, counts, spread.samples)
        steps = [sum(heights[n : n + together]) for n in range(0, len(heights), together)]
        edges = [*edges[:-1:together], edges[-1]]
        axes.stairs(steps, edges, linestyle=line, color=colour, linewidth=1.5, label=name)
        axes.axvline(spread.median, color=colour, linestyle=line, linewidth=1, alpha=0.8)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    legend(axes)
    return described("lengths-by-outcome", figure, found=found, together=together)


@style()
def speedup_by_length(found: Observations) -> Drawn:
    """Speedup (logarithmic) against length: samples as dots, the geometric mean and middle half of
    each tenth."""
    figure, (axes,) = new_figure(*SIZE_INCHES)
    speed = found.speedup
    labelled(axes, LENGTH_LABEL, f"{speed.label} (a ratio)")
    if not speed.points:
        note(axes, "no correct sample has a speedup")
        return described("speedup-by-length", figure, found=found)
    tokens, speedups = zip(*speed.points, strict=True)
    dots: Json = {"color": FIRST, "alpha": 0.35, "label": "a correct sample"}
    axes.plot(tokens, speedups, ".", markersize=4, **dots)
    label: str | None = "geometric mean of a tenth, middle half"
    for each in speed.tenths:
        middle = (each.from_tokens + each.to_tokens) / 2
        _bars(axes, [(middle, each.geometric_mean, each.p25, each.p75)], "s", SECOND, label)
        label = None
    axes.axhline(1.0, color=INK, linewidth=1, linestyle=":")
    ratios(axes)
    axes.set_xlim(left=0)
    legend(axes)
    return described("speedup-by-length", figure, found=found)


@style()
def difficulty_curves(found: Difficulty) -> Drawn:
    """Exec and geometric-mean speedup of easy, medium and hard tasks; beside them Exec with ARL
    from other samples than the outcomes."""
    figure, (left, right) = new_figure(*SIZE_INCHES, columns=2)
    labelled(left, "thirds of the tasks by ARL", "Exec (share correct)")
    labelled(right, "thirds of the tasks by ARL", "geometric-mean speedup (a ratio)")
    for axes, division, what, colour, form, shift, label in (
        (left, found.tertiles, "exec", FIRST, "o-", -0.04, "ARL and outcomes, same samples"),
        (left, found.split_half, "exec", SECOND, "s--", 0.04, "ARL of other samples"),
        (right, found.tertiles, "speedup", FIRST, "o-", 0.0, None),
    ):
        if found.tertiles is None or division is None:
            continue
        axes.set_xticks(range(len(division.groups)), [group.name for group in division.groups])
        estimates = [getattr(group, what) for group in division.groups]
        points = [
            (place + shift, each.value, each.lower, each.upper)
            for place, each in enumerate(estimates)
            if each.value is not None
        ]
        _bars(axes, points, form, colour, label)
        if not points:
            note(axes, "none")
    if found.tertiles is None:
        note(left, "too few tasks to divide")
    else:
        left.set_ylim(bottom=0)
        legend(left, 1)
    return described("difficulty", figure, found=found)


def _middles(tenths: Sequence[Bin]) -> list[Point]:
    """The middle of each tenth, and its accuracy."""
    return [
        ((each.from_tokens + (each.to_tokens or 0.0)) / 2, each.accuracy, each.lower, each.upper)
        for each in tenths
    ]


def _bars(axes: Axes, points: Sequence[Point], form: str, colour: str, label: str | None) -> None:
    """Values with their intervals; one without both bounds has no bar."""
    if points:
        places, values, lower, upper = np.array(points, dtype=float).T
        reach = np.nan_to_num(np.stack([values - lower, upper - values])).clip(0)
        reach[:, np.isnan(lower + upper)] = 0
        axes.errorbar(
            *(places, values, reach),
            fmt=form,
            capsize=3,
            markersize=5,
            linewidth=1.5,
            color=colour,
            label=label,
        )


def _filled(
    bins: Sequence[Bin], counts: Sequence[int], total: int
) -> tuple[list[float], list[float]]:
    """Heights and edges with a height of 0 where no sample is: only bins that hold some are in the
    record."""
    heights: list[float] = []
    edges = [bins[0].from_tokens]
    for each, count in zip(bins, counts, strict=True):
        if each.from_tokens > edges[-1]:
            heights.append(0.0)
            edges.append(each.from_tokens)
        heights.append(count / total)
        # the open bin is drawn as wide as its neighbours
        width = edges[-1] - edges[-2] if len(edges) > 1 else 1.0
        edges.append(each.from_tokens + width if each.to_tokens is None else each.to_tokens)
    return heights, edges
