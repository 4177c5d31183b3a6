"""What every figure of ours shares: colours, axes, a caption, and the files.

Guarantees: no pyplot, so nothing global is opened or left; the same figure gives the same bytes on
one matplotlib; one file reads on light and on dark pages (a transparent ground, everything drawn of
middle brightness); kinds are told apart by a colour and a hatch that stay apart for colour-blind
readers (`tests/tasks/test_composition_figures.py` computes it). Does not guarantee that a figure
says anything.
"""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# contrast against white and against #111 is above 3.5 : 1 for each
INK, FIRST, SECOND = "#808080", "#3d85c6", "#cc6d1f"
SIZE_INCHES, DOTS_PER_INCH = (7.0, 4.2), 150
CAPTION_CHARACTERS_PER_INCH = 15.5


class Drawn(NamedTuple):
    """A figure, the name of its files, and what it shows for those who cannot see it."""

    name: str
    figure: Figure
    alt: str


class Look(NamedTuple):
    """How one kind is filled. Three colours of one brightness are as many as every reader tells
    apart; the hatch says the rest."""

    colour: str
    hatch: str | None = None


LOOKS = (
    Look(FIRST),
    Look(SECOND),
    Look(FIRST, "//////"),
    Look(SECOND, "\\\\\\\\\\\\"),
    Look(FIRST, "...."),
    Look(SECOND, "xxxxx"),
    Look(INK, "//////"),
    Look(INK),
)


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **grid: object
) -> tuple[Figure, list[Axes]]:
    """An empty figure (inches) on a transparent ground with `rows` times `columns` axes, row by
    row; `grid` as in Figure.subplots."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0)
    return figure, list(figure.subplots(rows, columns, squeeze=False, **grid).flat)


def styled(axes: Axes, x: str, y: str, *, grid: str = "y") -> None:
    """Our axes: middle grey, no box, a faint grid across `grid`."""
    axes.patch.set_alpha(0)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.tick_params(which="both", colors=INK)
    for side, spine in axes.spines.items():
        spine.set_color(INK)
        spine.set_visible(side in ("left", "bottom"))
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color=INK, alpha=0.25, linewidth=0.6)


def legend(axes: Axes, columns: int = 2, **more: object) -> None:
    """A legend above the axes, so that it lies over no data; `more` as in Axes.legend. None where
    nothing has a label."""
    if "handles" in more or axes.get_legend_handles_labels()[0]:
        where = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "borderaxespad": 0.3}
        axes.legend(
            frameon=False,
            labelcolor=INK,
            fontsize="small",
            ncols=columns,
            columnspacing=1.2,
            **where,
            **more,
        )


def ratios(axes: Axes, which: str = "y") -> None:
    """A logarithmic axis of ratios in plain numbers, for what is drawn already: 1, 2, 5, 10 where
    it spans little, else powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    (axes.set_yscale if which == "y" else axes.set_xscale)("log")
    low, high = axes.get_ylim() if which == "y" else axes.get_xlim()
    axis = axes.yaxis if which == "y" else axes.xaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 60 * low else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def counts(axes: Axes, which: str = "x") -> None:
    """An axis of counts: few ticks, so that large ones have room."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(3 if which == "x" else 6, integer=True))
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def caption(figure: Figure, text: str) -> None:
    """What is drawn and of how many, under the figure and in its files: it goes with them wherever
    they are shown."""
    folded = textwrap.fill(
        " ".join(text.split()), int(CAPTION_CHARACTERS_PER_INCH * figure.get_figwidth())
    )
    figure.supxlabel(folded, x=0.01, ha="left", fontsize="small", color=INK)


def filled(look: Look) -> dict[str, object]:
    """Arguments of a bar of this look. What is hatched has no ground of its own: its lines alone
    would be too faint on it."""
    if look.hatch is None:
        return {"facecolor": look.colour, "edgecolor": look.colour, "linewidth": 0.8}
    return {"facecolor": "none", "edgecolor": look.colour, "linewidth": 0.8, "hatch": look.hatch}


def save(drawn: Drawn, directory: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write NAME.svg and NAME.png; the SVG carries the description. The directory must be there.
    Raises OSError where it cannot write."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(drawn.figure)
    vector, raster = (Path(directory) / f"{drawn.name}.{kind}" for kind in ("svg", "png"))
    # without a date, and with ids that depend on the content alone
    with rc_context({"svg.hashsalt": drawn.name}):
        drawn.figure.savefig(
            vector,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Title": drawn.name, "Description": drawn.alt},
        )
        drawn.figure.savefig(
            raster,
            format="png",
            transparent=True,
            dpi=DOTS_PER_INCH,
            metadata={"Software": None, "Description": drawn.alt},
        )
    return vector, raster
