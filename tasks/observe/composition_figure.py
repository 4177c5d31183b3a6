"""The figure of training sets, one row a set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kernels_eval.records import Json
from tasks.observe.composition import UNKNOWN, Quantiles, SetComposition
from tasks.reporting.charts import (
    FIRST,
    INK,
    LOOKS,
    SECOND,
    Drawn,
    Look,
    caption,
    counts,
    labelled,
    legend,
    new_figure,
    ratios,
    style,
)
from tasks.reporting.text import by_count, plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SINGLE, FUSION = LOOKS[0], LOOKS[3]
FAMILY_LOOKS = LOOKS[:5]
REST = "all others"
REST_LOOK = LOOKS[7]
LABELS = ("samples", "share of samples (%)", "reasoning length (tokens)", "speedup (a ratio)")


@style()
def composition_figure(sets: Sequence[SetComposition]) -> Drawn:
    height = 2.1 + 0.34 * max(len(sets), 2)
    widths = (1.0, 1.25, 1.0, 1.0)
    figure, drawn = new_figure(12.0, height, columns=4, sharey=True, width_ratios=widths)
    for axes, label in zip(drawn, LABELS, strict=True):
        labelled(axes, label, "", grid="x")
    sizes, families, lengths, speedups = drawn
    _draw_sizes(sizes, sets)
    _draw_families(families, sets)
    for place, each in enumerate(sets):
        _box(lengths, place, each.tokens, FIRST)
        _box(speedups, place, each.speedups, SECOND)
    counts(lengths)
    lengths.set_xlim(left=0)
    if any(each.speedups for each in sets):
        speedups.axvline(1.0, color=INK, linewidth=1, linestyle=":")
        ratios(speedups, "x")
    caption(
        figure,
        f"{plural(len(sets), 'set')}; n is the number of samples, written beside the first bars."
        " Boxes: middle half with the median, lines to the 10 % and 90 % quantiles. Dotted: as fast"
        " as the reference.",
    )
    return Drawn(
        "composition", figure, f"What each training set holds. {' '.join(map(_say, sets))}"
    )


def _say(each: SetComposition) -> str:
    """A set in words, for the alternative text."""
    families = ", ".join(f"{count:,} {name}" for name, count in each.families.items())
    tokens = f"median {each.tokens.median:,.0f} tokens" if each.tokens else "no reasoning"
    speedup = f"median speedup {each.speedups.median:.2f}" if each.speedups else "no speedup"
    return (
        f"{each.name}: {each.samples:,} samples of {each.tasks:,} tasks, {each.single_operator:,}"
        f" single operators, {each.fusion:,} fusions ({families}), {tokens}, {speedup}."
    )


def _draw_sizes(axes: Axes, sets: Sequence[SetComposition]) -> None:
    for place, each in enumerate(sets):
        axes.barh(place, each.single_operator, 0.62, **SINGLE.fill)
        axes.barh(place, each.fusion, 0.62, left=each.single_operator, **FUSION.fill)
        small: Json = {"fontsize": 7, "color": INK, "va": "center"}
        end = (each.samples, place)
        axes.annotate(f"{each.samples:,}", end, (3, 0), textcoords="offset points", **small)
    axes.set_yticks(range(len(sets)), [each.name for each in sets], fontsize=8)
    axes.set_ylim(len(sets) - 0.4, -0.6)
    # room for the count after the longest bar
    axes.set_xlim(0, 1.3 * max([*(each.samples for each in sets), 1]))
    counts(axes)
    _legend_above(axes, {"single operator": SINGLE, "fusion": FUSION}, 1)


def _draw_families(axes: Axes, sets: Sequence[SetComposition]) -> None:
    totals: Counter[str] = Counter()
    for each in sets:
        totals.update(each.families)
    known = [family for family, _ in by_count(totals) if family != UNKNOWN]
    looks = dict(zip(known, FAMILY_LOOKS, strict=False))
    if len(totals) > len(looks):
        looks[REST] = REST_LOOK
    for place, each in enumerate(sets):
        held = {name: each.families.get(name, 0) for name in looks}
        held[REST] = each.samples - sum(held.values())
        left = 0.0
        for name, look in looks.items():
            if count := held[name]:
                width = 100 * count / each.samples
                # a gap tells neighbours apart where their colours do not
                axes.barh(place, max(width - 0.4, 0.1), 0.62, left=left, **look.fill)
                left += width
    axes.set_xlim(0, 100)
    _legend_above(axes, looks, 2)


def _legend_above(axes: Axes, looks: Mapping[str, Look], columns: int) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(label=name, **look.fill) for name, look in looks.items()]
    legend(axes, columns, handles=handles, handleheight=1.0)


def _box(axes: Axes, place: int, found: Quantiles | None, colour: str) -> None:
    if found is not None:
        wide: Json = {"linewidth": 6, "alpha": 0.55, "solid_capstyle": "butt"}
        axes.plot([found.p10, found.p90], [place, place], "-", color=colour, linewidth=1.2)
        axes.plot([found.p25, found.p75], [place, place], "-", color=colour, **wide)
        axes.plot([found.median], [place], "o", color=colour, markersize=5)
