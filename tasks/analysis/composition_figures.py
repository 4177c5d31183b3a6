"""Figures of verdicts and training sets: statuses of each operator family, what each set holds, and
which samples sets share.

Guarantees: what `drawing` guarantees; no letters over what is drawn; every figure says how many it
is of; what is left out to keep it readable is counted under it. Does not guarantee that every
number is written in it: the alternative text and the records have them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tasks.analysis.composition import (
    STATUSES,
    UNKNOWN,
    FamilyStatuses,
    Overlap,
    Quantiles,
    SetComposition,
)
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

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# blue: it is right; orange: it was tried and failed; grey: there was nothing to judge
STATUS_LOOKS: dict[str, Look] = {
    "correct": LOOKS[0],
    "incorrect": LOOKS[1],
    "compile_error": LOOKS[3],
    "runtime_error": LOOKS[5],
    "timeout": Look(SECOND, "...."),
    "no_code": LOOKS[7],
    "rejected": LOOKS[6],
    "task_error": Look(INK, "...."),
}
OTHER = Look(FIRST, "xxxxx")
FAMILY_LOOKS = LOOKS[:5]
FAMILIES_SHOWN = len(FAMILY_LOOKS)
REST = "all others"
ROW_INCHES = 0.42
WRITTEN_FROM = 3.0  # percent of a bar under which its count has no room
INTERSECTIONS_SHOWN = 24


@style()
def status_figure(table: Sequence[FamilyStatuses]) -> Drawn:
    """Shares of verdict statuses for each operator family, one bar a family, counts under their
    parts."""
    figure, (axes,) = new_figure(8.4, 1.7 + ROW_INCHES * len(table))
    labelled(axes, "share of the family's candidates (%)", "", grid="x")
    present = [*STATUSES, *sorted({name for row in table for name in row.counts} - set(STATUSES))]
    present = [name for name in present if any(row.counts.get(name) for row in table)]
    for place, row in enumerate(table):
        left = 0.0
        for name in present:
            width = 100 * row.counts.get(name, 0) / row.candidates
            if not width:
                continue
            # a gap tells neighbours apart where their colours do not
            axes.barh(
                place - 0.1,
                max(width - 0.25, 0.1),
                0.46,
                left=left,
                **STATUS_LOOKS.get(name, OTHER).fill,
            )
            if width >= WRITTEN_FROM:
                axes.text(
                    left + width / 2,
                    place + 0.19,
                    f"{row.counts[name]:,}",
                    ha="center",
                    va="top",
                    fontsize=7,
                    color=INK,
                )
            left += width
    axes.set_yticks(
        range(len(table)),
        [
            f"{row.family}\nn {row.candidates:,}, {row.tasks:,} {_plural(row.tasks)}"
            for row in table
        ],
        fontsize=8,
    )
    axes.set_ylim(len(table) - 0.4, -0.5)
    axes.set_xlim(0, 100)
    _legend_above(axes, {name: STATUS_LOOKS.get(name, OTHER) for name in present}, 4)
    total, tasks = sum(row.candidates for row in table), sum(row.tasks for row in table)
    caption(
        figure,
        f"n {total:,} candidates of {tasks:,} tasks; a task counts for its leading operator family."
        " Numbers: candidates, where there is room.",
    )
    alt = " ".join(
        f"{row.family}: {', '.join(f'{count:,} {name}' for name, count in row.counts.items())}."
        for row in table
    )
    return Drawn(
        "status-by-family",
        figure,
        f"Verdict statuses of {total:,} candidates by operator family of their task. {alt}",
    )


@style()
def composition_figure(sets: Sequence[SetComposition]) -> Drawn:
    """Every set in a row: size with single operators apart, families, reasoning lengths,
    speedups."""
    figure, (sizes, families, lengths, speedups) = new_figure(
        12.0,
        2.1 + 0.34 * max(len(sets), 2),
        columns=4,
        sharey=True,
        width_ratios=(1.0, 1.25, 1.0, 1.0),
    )
    labels = ("samples", "share of samples (%)", "reasoning length (tokens)", "speedup (a ratio)")
    for axes, label in zip((sizes, families, lengths, speedups), labels, strict=True):
        labelled(axes, label, "", grid="x")
    shown = _most_frequent(sets)
    looks = {**dict(zip(shown, FAMILY_LOOKS, strict=False)), REST: LOOKS[7]}
    for place, each in enumerate(sets):
        sizes.barh(place, each.single_operator, 0.62, **LOOKS[0].fill)
        sizes.barh(place, each.fusion, 0.62, left=each.single_operator, **LOOKS[3].fill)
        sizes.annotate(
            f"{each.samples:,}",
            (each.samples, place),
            (3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            color=INK,
        )
        left = 0.0
        for name, look in looks.items():
            count = (
                sum(n for family, n in each.families.items() if family not in shown)
                if name == REST
                else each.families.get(name, 0)
            )
            if count:
                width = 100 * count / each.samples
                families.barh(place, max(width - 0.4, 0.1), 0.62, left=left, **look.fill)
                left += width
        _box(lengths, place, each.tokens, FIRST)
        _box(speedups, place, each.speedups, SECOND)
    if any(each.speedups for each in sets):
        speedups.axvline(1.0, color=INK, linewidth=1, linestyle=":")
        ratios(speedups, "x")
    sizes.set_yticks(range(len(sets)), [each.name for each in sets], fontsize=8)
    sizes.set_ylim(len(sets) - 0.4, -0.6)
    sizes.set_xlim(0, 1.3 * max([each.samples for each in sets] + [1]))
    counts(sizes)
    counts(lengths)
    families.set_xlim(0, 100)
    lengths.set_xlim(left=0)
    _legend_above(sizes, {"single operator": LOOKS[0], "fusion": LOOKS[3]}, 1)
    used = {family for each in sets for family in each.families}
    _legend_above(
        families,
        {
            name: look
            for name, look in looks.items()
            if name in used or (name == REST and used - set(shown))
        },
        2,
    )
    timed = "".join(
        f"; {each.name} {each.speedups.n if each.speedups else 0:,}"
        for each in sets
        if _untimed(each)
    )
    caption(
        figure,
        f"{len(sets)} {'sets' if len(sets) > 1 else 'set'}; n is the number of samples, written"
        " beside the first bars. Boxes: middle half with the median, lines to the 10 % and 90 %"
        " quantiles. Dotted: as fast as the reference."
        + (f" Speedups of fewer: {timed[2:]}." if timed else ""),
    )
    return Drawn(
        "composition",
        figure,
        "What each training set holds. " + " ".join(_said(each) for each in sets),
    )


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
    places = range(len(shown))
    bars.bar(places, [each.samples for each in shown], 0.6, color=FIRST)
    for place, each in zip(places, shown, strict=True):
        bars.annotate(
            f"{each.samples:,}",
            (place, each.samples),
            (0, 2),
            textcoords="offset points",
            ha="center",
            fontsize=7,
            color=INK,
        )
        absent = [number for number in range(len(sets)) if number not in each.sets]
        dots.plot([place] * len(absent), absent, "o", color=INK, markersize=2)
        dots.plot(
            [place] * len(each.sets), each.sets, "o-", color=FIRST, markersize=7, linewidth=1.5
        )
    sizes.barh(range(len(sets)), [each.samples for each in sets], 0.6, color=INK)
    sizes.set_xlim(1.3 * max([each.samples for each in sets] + [1]), 0)  # towards the names
    for place, held_by in enumerate(sets):
        sizes.annotate(
            f"{held_by.samples:,}",
            (held_by.samples, place),
            (-3, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=7,
            color=INK,
        )
    for axes in (sizes, dots):
        axes.set_ylim(max(len(sets), 1) - 0.5, -0.5)
    for axes in (bars, dots):
        axes.set_xlim(-0.6, max(len(shown), 1) - 0.4)
        axes.set_xticks([])
    for side in ("left", "bottom"):
        dots.spines[side].set_visible(False)
    sizes.spines["left"].set_visible(False)
    sizes.spines["right"].set_visible(True)
    sizes.set_yticks([])
    counts(sizes)
    counts(bars, "y")
    dots.tick_params(left=False)
    dots.set_yticks(range(len(sets)), [_joined(each.names) for each in sets], fontsize=8)
    bars.set_ylim(0, 1.1 * max([each.samples for each in shown] + [1]))
    left_out = found.intersections[len(shown) :]
    few, named = sum(each.samples for each in left_out), sum(len(each.names) for each in sets)
    rest = (
        f" {len(left_out):,} smaller intersections with {few:,} samples are not drawn."
        if left_out
        else ""
    )
    caption(
        figure,
        f"n {found.samples:,} different samples in {named:,} sets. Large dots: in the set.{rest}",
    )
    names = [" and ".join(each.names) for each in sets]
    said = " ".join(
        f"{each.samples:,} in {', '.join(names[number] for number in each.sets)} only."
        for each in shown[:8]
    )
    held = ", ".join(f"{name} {each.samples:,}" for name, each in zip(names, sets, strict=True))
    return Drawn(
        "overlap",
        figure,
        f"Overlap of training sets, {found.samples:,} different samples. Sizes: {held}. Largest"
        f" parts: {said}",
    )


def _joined(names: Sequence[str]) -> str:
    """Names of sets that are the same, as there is room for."""
    return " = ".join(names[:2]) + (f" = {len(names) - 2} more" if len(names) > 2 else "")


def _plural(tasks: int) -> str:
    return "task" if tasks == 1 else "tasks"


def _legend_above(axes: Axes, looks: dict[str, Look], columns: int) -> None:
    from matplotlib.patches import Patch

    legend(
        axes,
        columns,
        handles=[Patch(label=name, **look.fill) for name, look in looks.items()],
        handleheight=1.0,
    )


def _box(axes: Axes, place: int, found: Quantiles | None, colour: str) -> None:
    if found is None:
        return
    axes.plot([found.p10, found.p90], [place, place], "-", color=colour, linewidth=1.2)
    axes.plot(
        [found.p25, found.p75],
        [place, place],
        "-",
        color=colour,
        linewidth=6,
        alpha=0.55,
        solid_capstyle="butt",
    )
    axes.plot([found.median], [place], "o", color=colour, markersize=5)


def _most_frequent(sets: Sequence[SetComposition]) -> tuple[str, ...]:
    """The families that have a look of their own, by how many samples of all sets together they
    have."""
    totals: dict[str, int] = {}
    for each in sets:
        for family, count in each.families.items():
            totals[family] = totals.get(family, 0) + count
    ordered = sorted(
        (family for family in totals if family != UNKNOWN),
        key=lambda family: (-totals[family], family),
    )
    return tuple(ordered[:FAMILIES_SHOWN])


def _untimed(each: SetComposition) -> bool:
    return (each.speedups.n if each.speedups else 0) < each.samples


def _said(each: SetComposition) -> str:
    families = ", ".join(f"{count:,} {name}" for name, count in each.families.items())
    tokens = f", median {each.tokens.median:,.0f} tokens" if each.tokens else ""
    speedup = f", median speedup {each.speedups.median:.2f}" if each.speedups else ", no speedup"
    kinds = f"{each.single_operator:,} single operators, {each.fusion:,} fusions"
    return (
        f"{each.name}: {each.samples:,} samples of {each.tasks:,} tasks, {kinds}"
        f" ({families}){tokens}{speedup}."
    )
