"""Figures of the observations and of difficulty, drawn from their records.

Guarantees: what `drawing` guarantees; what a colour says, a shape or a label says too; how many
samples and tasks are drawn is said under each. Does not guarantee that a figure is there: where a
record holds nothing to draw, it says so in words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tasks.analysis.records import Bin, Difficulty, Division, Observations
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
from tasks.reporting.findings import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_STEPS, ENOUGH_SAMPLES = (
    8,
    2000,
)  # steps of a distribution of very few samples; how many are enough for bins as they are
FULL_BIN = (
    20  # samples under which a fixed bin is only a dot: its interval would cover half of the figure
)


def all_figures(observations: Observations, difficulty: Difficulty) -> list[Drawn]:
    """Return the figures of an analysis, in the order of its page."""
    drawn = [
        draw(observations) for draw in (accuracy_by_length, lengths_by_outcome, speedup_by_length)
    ]
    return [*drawn, difficulty_curves(difficulty)]


@style()
def accuracy_by_length(found: Observations) -> Drawn:
    """The paper's figure 2: accuracy in tenths of the samples by length with Wilson intervals, and
    the fixed bins as dots."""
    figure, axes = _axes("reasoning length (tokens)", "share correct")
    shown = found.everything
    ends = [shown.tenths[-1].to_tokens or 0.0] if shown.tenths else [1.0]
    for each in shown.bins:
        middle = (each.from_tokens + (each.to_tokens or max(each.from_tokens, ends[0]))) / 2
        full = each.samples >= FULL_BIN
        axes.plot(
            middle,
            each.accuracy,
            "o",
            color=FIRST,
            alpha=0.55 if full else 0.25,
            markersize=min(9.0, 2 + math.sqrt(each.samples) / 3),
        )
    _tenths(axes, shown.tenths, FIRST, "o", "all samples, tenths")
    if found.complete is not None:
        _tenths(axes, found.complete.tenths, SECOND, "s", "without those cut off")
    axes.set_ylim(
        0, max(0.1, min(1.0, 1.15 * max((each.upper for each in shown.tenths), default=1.0)))
    )
    axes.set_xlim(left=0)
    legend(axes)
    cut = (
        f"; without those cut off n {found.complete.samples:,}"
        if found.complete is not None
        else ""
    )
    caption(
        figure,
        f"n {shown.samples:,} samples of {shown.tasks:,} tasks, {shown.correct:,} correct{cut}."
        " Bars: 95 % Wilson intervals of tenths. Dots: bins of fixed width, larger with more"
        " samples.",
    )
    alt = (
        "Share correct against reasoning length, in tenths of the samples with 95 % Wilson"
        " intervals. "
        + " ".join(
            f"{each.from_tokens:,.0f} to {(each.to_tokens or 0) - 1:,.0f} tokens:"
            f" {100 * each.accuracy:.0f} %."
            for each in shown.tenths
        )
    )
    return Drawn("accuracy-by-length", figure, alt.strip())


@style()
def lengths_by_outcome(found: Observations) -> Drawn:
    """Distributions of length of correct and of incorrect samples, each summing to 1, over the
    fixed bins, or several of them together where samples are so few that each bin would hold a
    handful."""
    figure, axes = _axes("reasoning length (tokens)", "share of the outcome's samples in a bin")
    bins, population = found.everything.bins, found.everything
    spreads = (
        ("correct", population.correct_lengths, FIRST, "-"),
        ("incorrect", population.incorrect_lengths, SECOND, "--"),
    )
    fewest = min((spread.samples for _, spread, _, _ in spreads if spread is not None), default=0)
    together = (
        math.ceil(len(bins) / max(MOST_STEPS, 2 * math.sqrt(fewest)))
        if fewest < ENOUGH_SAMPLES
        else 1
    )
    said = []
    for name, spread, colour, line in spreads:
        if spread is None:
            continue
        counts = [
            each.correct if name == "correct" else each.samples - each.correct for each in bins
        ]
        heights, edges = _coarser(*_filled(bins, counts, spread.samples), together)
        axes.stairs(heights, edges, linestyle=line, color=colour, linewidth=1.5, label=name)
        axes.axvline(spread.median, color=colour, linestyle=line, linewidth=1, alpha=0.8)
        said.append(
            f"{name}: median {spread.median:,.0f} tokens, middle half {spread.p25:,.0f} to"
            f" {spread.p75:,.0f}, n {spread.samples:,}."
        )
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    legend(axes)
    wide = f" Steps of {together} bins." if together > 1 else ""
    wrong = population.samples - population.correct
    caption(
        figure,
        f"n {population.correct:,} correct, {wrong:,} incorrect. Vertical lines: medians.{wide}",
    )
    return Drawn(
        "lengths-by-outcome",
        figure,
        "Distribution of reasoning length by outcome; vertical lines are medians. "
        + " ".join(said),
    )


@style()
def speedup_by_length(found: Observations) -> Drawn:
    """Speedup (logarithmic) against length: samples as dots, the geometric mean and middle half of
    each tenth."""
    figure, axes = _axes("reasoning length (tokens)", f"{found.speedup.label} (a ratio)")
    speed = found.speedup
    if not speed.points:
        note(axes, "no correct sample has a speedup")
        return Drawn(
            "speedup-by-length", figure, "Nothing to draw: no correct sample has a speedup."
        )
    axes.plot(
        *zip(*speed.points, strict=True),
        ".",
        color=FIRST,
        alpha=0.35,
        markersize=4,
        label="a correct sample",
    )
    for number, each in enumerate(speed.tenths):
        middle, name = (
            (each.from_tokens + each.to_tokens) / 2,
            ("geometric mean of a tenth, middle half" if number == 0 else None),
        )
        point = (middle, each.geometric_mean, each.p25, each.p75)
        _bars(axes, [point], "s", SECOND, name)
    axes.axhline(1.0, color=INK, linewidth=1, linestyle=":")
    ratios(axes)
    axes.set_xlim(left=0)
    legend(axes)
    rho = speed.spearman
    known = f"{rho.value:.3f}" if rho.value is not None else "unknown"
    dots = "" if len(speed.points) == speed.samples else f", {len(speed.points):,} of them drawn"
    of = f"n {speed.samples:,} correct samples of {speed.tasks:,} tasks with a speedup{dots}"
    caption(figure, f"{of}. Spearman {known}. Dotted: a ratio of 1.")
    return Drawn(
        "speedup-by-length",
        figure,
        f"{speed.label} against reasoning length of {speed.samples:,} correct samples; Spearman"
        f" {known}.",
    )


@style()
def difficulty_curves(found: Difficulty) -> Drawn:
    """Exec and geometric-mean speedup of easy, medium and hard tasks; beside them Exec with ARL
    from other samples than the outcomes."""
    figure, (left, right) = new_figure(*SIZE_INCHES, columns=2)
    for axes, label in (
        (left, "Exec (share correct)"),
        (right, "geometric-mean speedup (a ratio)"),
    ):
        labelled(axes, "thirds of the tasks by ARL", label)
    if found.tertiles is None:
        note(left, "too few tasks to divide")
        return Drawn("difficulty", figure, "Nothing to draw: too few tasks to divide.")
    _curve(left, found.tertiles, "exec", FIRST, "o-", -0.04, "ARL and outcomes, same samples")
    if found.split_half is not None:
        _curve(left, found.split_half, "exec", SECOND, "s--", 0.04, "ARL of other samples")
    _curve(right, found.tertiles, "speedup", FIRST, "o-", 0.0, None)
    left.set_ylim(bottom=0)
    legend(left, 1)
    sizes = ", ".join(
        f"{group.name} {group.tasks:,} tasks ({group.samples:,} samples)"
        for group in found.tertiles.groups
    )
    caption(
        figure,
        f"Thirds of {found.tasks:,} tasks by average reasoning length (ARL): {sizes}. Bars: 95 %"
        " intervals over tasks.",
    )
    said = " ".join(
        f"{group.name} (ARL {group.from_arl:,.0f} to {group.to_arl:,.0f}): {_percent(group.exec)}."
        for group in found.tertiles.groups
    )
    return Drawn(
        "difficulty",
        figure,
        "Exec and geometric-mean speedup of thirds of the tasks by ARL, with 95 % intervals. Exec:"
        f" {said}",
    )


def _axes(x: str, y: str) -> tuple[Figure, Axes]:
    figure, (axes,) = new_figure(*SIZE_INCHES)
    labelled(axes, x, y)
    return figure, axes


def _tenths(axes: Axes, tenths: tuple[Bin, ...], colour: str, marker: str, label: str) -> None:
    points = [
        (
            (each.from_tokens + (each.to_tokens or each.from_tokens)) / 2,
            each.accuracy,
            each.lower,
            each.upper,
        )
        for each in tenths
    ]
    _bars(axes, points, f"{marker}-", colour, label)


def _curve(
    axes: Axes,
    division: Division,
    what: str,
    colour: str,
    style: str,
    shift: float,
    label: str | None,
) -> None:
    axes.set_xticks(range(len(division.groups)), [group.name for group in division.groups])
    points = []
    for place, group in enumerate(division.groups):
        found: Estimate = getattr(group, what)
        if found.value is not None:
            lower, upper = (found.lower, found.upper) if found.bounded else (None, None)
            points.append((place + shift, found.value, lower, upper))
    if not points:
        note(axes, "none")
        return
    _bars(axes, points, style, colour, label)


Point = tuple[float, float, float | None, float | None]
"""Place, value and its bounds."""


def _bars(axes: Axes, points: Sequence[Point], form: str, colour: str, label: str | None) -> None:
    """Values with their intervals."""
    if points:
        below = [
            max(0.0, value - (value if lower is None else lower)) for _, value, lower, _ in points
        ]
        above = [
            max(0.0, (value if upper is None else upper) - value) for _, value, _, upper in points
        ]
        places, values = zip(*((place, value) for place, value, _, _ in points), strict=True)
        look: dict[str, Any] = {"color": colour, "label": label, "linewidth": 1.5}
        axes.errorbar(
            places, values, yerr=[below, above], fmt=form, capsize=3, markersize=5, **look
        )


def _filled(
    bins: Sequence[Bin], counts: Sequence[int], total: int
) -> tuple[list[float], list[float]]:
    """Heights and edges with a height of 0 where no sample is: only bins that hold some are in the
    record."""
    heights: list[float] = []
    edges: list[float] = []
    for each, count in zip(bins, counts, strict=True):
        if edges and each.from_tokens > edges[-1]:
            heights.append(0.0)
            edges.append(each.from_tokens)
        edges = edges or [each.from_tokens]
        heights.append(count / total)
        # the open bin is drawn as wide as its neighbours
        edges.append(
            each.to_tokens
            if each.to_tokens is not None
            else each.from_tokens + (edges[-1] - edges[-2] if len(edges) > 1 else 1.0)
        )
    return heights, edges


def _coarser(
    heights: list[float], edges: list[float], together: int
) -> tuple[list[float], list[float]]:
    """So many neighbours as one step, as high as their sum."""
    return [sum(heights[n : n + together]) for n in range(0, len(heights), together)], [
        *edges[:-1:together],
        edges[-1],
    ]


def _percent(estimate: Estimate) -> str:
    return f"{100 * estimate.value:.0f} %" if estimate.value is not None else "none"
