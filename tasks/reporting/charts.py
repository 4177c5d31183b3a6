"""The shared look of figures: palette, axes, caption, and output as SVG or files. Readable on light
and dark pages, and for colour-blind readers; labels are inert."""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# contrast against white and against #111 is above 3.5 : 1 for each
INK, FIRST, SECOND, MUTED = "#808080", "#3d85c6", "#cc6d1f", "#7f8794"
SIZE_INCHES, DOTS_PER_INCH = (7.0, 4.2), 150
WIDTH = 7.4  # inches, of a figure that a page shows
CAPTION_CHARACTERS_PER_INCH = 15.5
SETTINGS = Path(__file__).with_name("concur.mplstyle")
_SVG_STYLE = (
    "<style>svg{color:#1d2126}@media(prefers-color-scheme:dark){svg{color:#dfe3e8}}</style>"
)


class Drawn(NamedTuple):
    """A figure, the name of its files, and its alternative text."""

    name: str
    figure: Figure
    alt: str


@contextmanager
def style() -> Iterator[None]:
    """Decorator of a drawing function, as labels are made while it draws."""
    import matplotlib

    with matplotlib.rc_context(fname=SETTINGS):
        yield


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **grid: Any
) -> tuple[Figure, list[Axes]]:
    """Return an empty figure (inches) and its `rows` times `columns` axes, row by row.

    `grid` is as in Figure.subplots. Call inside `style`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **grid).flat)


def labelled(axes: Axes, x: str, y: str, *, grid: Literal["both", "x", "y"] = "y") -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(axis=grid)


def point_rows(
    axes: Axes,
    names: Sequence[str],
    rows: Sequence[tuple[float | None, float | None, float | None, str]] = (),
    *,
    size: float = 4,
) -> None:
    """Name the rows of the axes, first on top, and draw a point with its interval in each: (value,
    lower, upper, colour); None is not drawn."""
    for place, (value, lower, upper, colour) in enumerate(rows):
        if lower is not None and upper is not None:
            axes.hlines(place, lower, upper, color=colour, linewidth=1.8)
        if value is not None:  # whole at the edge too
            axes.plot([value], [place], marker="o", markersize=size, color=colour, clip_on=False)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)


def legend(axes: Axes, columns: int = 2, **more: object) -> None:
    """Put a legend above the axes, clear of data, if anything has a label.

    `more` is as in Axes.legend."""
    if "handles" in more or axes.get_legend_handles_labels()[0]:
        axes.legend(
            ncols=columns, loc="lower left", bbox_to_anchor=(0, 1.0), borderaxespad=0.3, **more
        )


def caption(figure: Figure, text: str) -> None:
    width = int(CAPTION_CHARACTERS_PER_INCH * figure.get_figwidth())
    folded = textwrap.fill(" ".join(text.split()), width)
    figure.supxlabel(folded, x=0.01, ha="left", fontsize="small")


def svg_of(figure: Figure) -> str:
    """Return a figure as SVG text in the page's text colour. Call in `style`."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    return svg.replace("<defs>", f"{_SVG_STYLE}<defs>", 1)


@style()
def save(drawn: Drawn, directory: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write NAME.svg and NAME.png with the description into an existing directory. Raises
    OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(drawn.figure)
    vector, raster = (Path(directory) / f"{drawn.name}.{kind}" for kind in ("svg", "png"))
    about = {"Description": drawn.alt}
    # without a date or a version: the bytes depend on the content alone
    drawn.figure.savefig(
        vector, transparent=True, metadata={"Date": None, "Title": drawn.name, **about}
    )
    drawn.figure.savefig(
        raster, transparent=True, dpi=DOTS_PER_INCH, metadata={"Software": None, **about}
    )
    return vector, raster
