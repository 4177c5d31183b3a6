"""Figures of verdicts and training sets: statuses of each operator family, what each set holds, and
which samples sets share.

Guarantees: what `charts` guarantees; no letters over what is drawn; every figure says how many it
is of; what is left out to keep it readable is counted under it. Does not guarantee that every
number is written in it: the alternative text and the records have them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kernels_eval.records import Json, Status
from tasks.analysis.composition import (
    UNKNOWN,
    FamilyStatuses,
    Overlap,
    Quantiles,
    SetComposition,
    in_order,
)
from tasks.analysis.figures import described
from tasks.reporting.charts import (
    FIRST,
    INK,
    LOOKS,
    SECOND,
    Drawn,
    Look,
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

# blue: it is right; orange: it was tried and failed; grey: there was nothing to judge
STATUS_LOOKS: dict[str, Look] = {
    Status.CORRECT: LOOKS[0],
    Status.INCORRECT: LOOKS[1],
    Status.COMPILE_ERROR: LOOKS[3],
    Status.RUNTIME_ERROR: LOOKS[5],
    Status.TIMEOUT: Look(SECOND, "...."),
    Status.NO_CODE: LOOKS[7],
    Status.REJECTED: LOOKS[6],
    Status.TASK_ERROR: Look(INK, "...."),
}
OTHER = Look(FIRST, "xxxxx")
FAMILY_LOOKS = LOOKS[:5]
REST = "all others"
ROW_INCHES = 0.42
WRITTEN_FROM = 3.0  # percent of a bar under which its count has no room
INTERSECTIONS_SHOWN = 24
SMALL: Json = {"fontsize": 7, "color": INK}


@style()
def status_figure(table: Sequence[FamilyStatuses]) -> Drawn:
    """Shares of verdict statuses for each operator family, one bar a family, counts under their
    parts."""
    figure, (axes,) = new_figure(8.4, 1.7 + ROW_INCHES * len(table))
    labelled(axes, "share of the family's candidates (%)", "", grid="x")
    present = in_order({name for row in table for name in row.counts})
    looks = {name: STATUS_LOOKS.get(name, OTHER) for name in present}
    for place, row in enumerate(table):
        # a gap tells neighbours apart where their colours do not
        for name, left, width in _stacked(axes, place - 0.1, 0.46, row.counts, looks, 0.25):
            if width >= WRITTEN_FROM:
                at = (left + width / 2, place + 0.19)
                axes.text(*at, f"{row.counts[name]:,}", ha="center", va="top", **SMALL)
    names = [f"{row.family}\nn {row.candidates:,}, {plural(row.tasks, 'task')}" for row in table]
    axes.set_yticks(range(len(table)), names, fontsize=8)
    axes.set_ylim(len(table) - 0.4, -0.5)
    axes.set_xlim(0, 100)
    _legend_above(axes, looks, 4)
    return described("status-by-family", figure, table=table)


@style()
def composition_figure(sets: Sequence[SetComposition]) -> Drawn:
    """Every set in a row: size with single operators apart, families, reasoning lengths,
    speedups."""
    figure, drawn = new_figure(
        12.0,
        2.1 + 0.34 * max(len(sets), 2),
        columns=4,
        sharey=True,
        width_ratios=(1.0, 1.25, 1.0, 1.0),
    )
    labels = ("samples", "share of samples (%)", "reasoning length (tokens)", "speedup (a ratio)")
    for axes, label in zip(drawn, labels, strict=True):
        labelled(axes, label, "", grid="x")
    sizes, families, lengths, speedups = drawn
    shown, looks = _family_looks(sets)
    for place, each in enumerate(sets):
        sizes.barh(place, each.single_operator, 0.62, **LOOKS[0].fill)
        sizes.barh(place, each.fusion, 0.62, left=each.single_operator, **LOOKS[3].fill)
        _written(sizes, each.samples, (each.samples, place), (3, 0), va="center")
        held = {name: each.families.get(name, 0) for name in shown}
        rest = {REST: each.samples - sum(held.values())}
        _stacked(families, place, 0.62, held | rest, looks, 0.4)
        _box(lengths, place, each.tokens, FIRST)
        _box(speedups, place, each.speedups, SECOND)
    if any(each.speedups for each in sets):
        speedups.axvline(1.0, color=INK, linewidth=1, linestyle=":")
        ratios(speedups, "x")
    sizes.set_yticks(range(len(sets)), [each.name for each in sets], fontsize=8)
    sizes.set_ylim(len(sets) - 0.4, -0.6)
    _room_for(sizes, [each.samples for each in sets])
    counts(lengths)
    families.set_xlim(0, 100)
    lengths.set_xlim(left=0)
    _legend_above(sizes, {"single operator": LOOKS[0], "fusion": LOOKS[3]}, 1)
    _legend_above(families, looks, 2)
    untimed = [each for each in sets if not each.speedups or each.speedups.n < each.samples]
    untimed = [each for each in untimed if each.samples]
    return described("composition", figure, sets=sets, untimed=untimed)


@style()
def overlap_figure(found: Overlap) -> Drawn:
    """An UpSet plot (Lex et al. 2014): samples that are in exactly the sets whose dots are joined,
    and the size of every set."""
    sets, shown = found.sets, found.intersections[:INTERSECTIONS_SHOWN]
    figure, (corner, bars, sizes, dots) = new_figure(
        max(9.0, 5.6 + 0.30 * len(shown)),
        3.2 + 0.27 * len(sets),
        2,
        2,
        width_ratios=(1.9, max(0.30 * len(shown), 1.9)),
        height_ratios=(1.9, max(0.27 * len(sets), 0.6)),
    )
    corner.axis("off")
    labelled(bars, "", "samples in exactly these sets")
    labelled(sizes, "samples in the set", "", grid="x")
    labelled(dots, "", "", grid="both")
    bars.bar(range(len(shown)), [each.samples for each in shown], 0.6, color=FIRST)
    for place, each in enumerate(shown):
        _written(bars, each.samples, (place, each.samples), (0, 2), ha="center")
        absent = [number for number in range(len(sets)) if number not in each.sets]
        dots.plot([place] * len(absent), absent, "o", color=INK, markersize=2)
        within: Json = {"color": FIRST, "markersize": 7, "linewidth": 1.5}
        dots.plot([place] * len(each.sets), each.sets, "o-", **within)
    sizes.barh(range(len(sets)), [each.samples for each in sets], 0.6, color=INK)
    _room_for(sizes, [each.samples for each in sets])
    sizes.invert_xaxis()  # towards the names
    for place, held in enumerate(sets):
        _written(sizes, held.samples, (held.samples, place), (-3, 0), ha="right", va="center")
    for axes in (sizes, dots):
        axes.set_ylim(max(len(sets), 1) - 0.5, -0.5)
    for axes in (bars, dots):
        axes.set_xlim(-0.6, max(len(shown), 1) - 0.4)
        axes.set_xticks([])
    dots.spines[["left", "bottom"]].set_visible(False)
    sizes.spines["left"].set_visible(False)
    sizes.spines["right"].set_visible(True)
    sizes.set_yticks([])
    counts(bars, "y")
    dots.tick_params(left=False)
    dots.set_yticks(range(len(sets)), [_joined(each.names) for each in sets], fontsize=8)
    bars.set_ylim(0, 1.1 * max([each.samples for each in shown] + [1]))
    return described(
        "overlap",
        figure,
        found=found,
        shown=shown,
        left_out=found.intersections[len(shown) :],
        named=sum(len(each.names) for each in sets),
    )


def _stacked(
    axes: Axes,
    place: float,
    height: float,
    parts: Mapping[str, int],
    looks: Mapping[str, Look],
    gap: float,
) -> list[tuple[str, float, float]]:
    """Draw one bar of 100 % in the order of `looks`; return each part's name, left end, width."""
    drawn, left, total = [], 0.0, sum(parts.values())
    for name, look in looks.items():
        if count := parts.get(name, 0):
            width = 100 * count / total
            axes.barh(place, max(width - gap, 0.1), height, left=left, **look.fill)
            drawn.append((name, left, width))
            left += width
    return drawn


def _written(
    axes: Axes, count: int, at: tuple[float, float], offset: tuple[float, float], **where: Any
) -> None:
    axes.annotate(f"{count:,}", at, offset, textcoords="offset points", **where, **SMALL)


def _room_for(axes: Axes, sizes: Sequence[int]) -> None:
    """Leave room for the count after the longest bar."""
    axes.set_xlim(0, 1.3 * max([*sizes, 1]))
    counts(axes)


def _joined(names: Sequence[str]) -> str:
    """Names of sets that are the same, as there is room for."""
    return " = ".join(names[:2]) + (f" = {len(names) - 2} more" if len(names) > 2 else "")


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


def _family_looks(sets: Sequence[SetComposition]) -> tuple[list[str], dict[str, Look]]:
    """The families that have a look of their own, by how many samples of all sets together they
    have; and all looks that are drawn."""
    totals: Counter[str] = Counter()
    for each in sets:
        totals.update(each.families)
    known = [family for family, _ in by_count(totals) if family != UNKNOWN]
    shown = known[: len(FAMILY_LOOKS)]
    looks = dict(zip(shown, FAMILY_LOOKS, strict=False))
    return shown, looks | ({REST: LOOKS[7]} if len(totals) > len(shown) else {})
