"""The trend over the nights of a root: what each finished refresh came to, as a page with a figure.

Guarantees: a night is measured once, when it ends, and kept as `morning/<id>.json`, so that the
trend outlives its snapshots; a night without that file is measured from its snapshots, or left
out. Nights of another name or language are another trend.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from flows.morning.history import Refresh, before, read_under, refreshes, write_under
from flows.morning.report import Morning, report_of
from kernels_eval.errors import UsageError
from kernels_eval.records import Json, Record
from kernels_eval.tables import table_beside
from tasks.reporting.text import number, plural
from tasks.tables import CORRECT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = "trend.html"
TEMPLATE = Path(__file__).parent / "templates" / "trend.j2"
METRICS: dict[str, list[str]] = table_beside(__file__)
"""Numbers of a night: what each is called, and how it is written."""


class Night(Record):
    """One finished refresh. Shares are over all its verdicts, in [0, 1]; a speedup is reference
    time divided by candidate time; None: nothing was correct and timed."""

    id: str
    began_at: str
    correct_share: float | None = None
    faster_share: float | None = None
    median_speedup: float | None = None
    sampled: int = 0
    new: int = 0
    set_size: int = 0
    wall_hours: float = 0.0
    gpu_hours: float = 0.0


def night_of(found: Morning) -> Night:
    """The numbers of a finished refresh, from its report and the timings of its verdicts."""
    refresh, changes = found.refresh, {change.what: change for change in found.changes}
    frame = (
        refresh.snapshots["verdicts"]
        .open()
        .read(columns=["candidate_id", "status", "timing"], unique="candidate_id")
    )
    correct = frame.filter(CORRECT) if frame.height else frame
    timing = correct["timing"].drop_nulls() if correct.height else ()
    speedups = [each["speedup"] for each in timing if each["speedup"]]
    return Night(
        id=refresh.id,
        began_at=refresh.began_at,
        correct_share=correct.height / frame.height if frame.height else None,
        faster_share=sum(each > 1 for each in speedups) / frame.height if frame.height else None,
        median_speedup=statistics.median(speedups) if speedups else None,
        sampled=changes["candidates"].rows,
        new=changes["candidates"].new,
        set_size=changes["curated"].rows,
        wall_hours=(refresh.seconds or 0.0) / 3600,
        gpu_hours=found.gpu_hours,
    )


def nights(root: str, name: str, language: str) -> list[Night]:
    """The finished refreshes of one name and language, oldest first."""
    found = []
    for each in refreshes(root):
        if (each.name, each.language, each.ending) == (name, language, "finished"):
            with suppress(UsageError, KeyError):  # its snapshots were removed
                found.append(_kept(root, each))
    return found


def _kept(root: str, refresh: Refresh) -> Night:
    place = f"morning/{refresh.id}.json"
    with suppress(OSError, ValueError):
        return Night.model_validate(json.loads(read_under(root, place)))
    night = night_of(report_of(refresh, *before(root, refresh)))
    write_under(root, place, night.model_dump_json())
    return night


def write_trend(root: str, newest: Refresh, found: Sequence[Night]) -> str:
    """Write `trend.html` of these nights, with a line for each number; returns its path. Raises
    UsageError."""
    from tasks.reporting.charts import style, svg_of
    from tasks.reporting.page import Table, page_of

    with style():
        drawn = {"trend": svg_of(_figure(found))}
    text = page_of(
        TEMPLATE,
        "html",
        title=f"Trend over nights: {newest.name}",
        facts=(newest.language, plural(len(found), "finished night")),
        sentence=sentence_of(found),
        drawn=drawn,
        table=Table(("night", *(words for words, _ in METRICS.values())), rows_of(found)),
    )
    return write_under(root, PAGE, text)


def sentence_of(found: Sequence[Night]) -> str:
    """Each number of the night before and of the newest one."""
    nights = rows_of(found)[1::-1]
    said = [" to ".join(values) for values in zip(*nights, strict=True)][1:]
    pairs = zip(METRICS.values(), said, strict=True)
    return "; ".join(f"{words} {value}" for (words, _), value in pairs) + "."


def rows_of(found: Sequence[Night]) -> list[tuple[str, ...]]:
    """Newest first: the night, then METRICS."""
    return [
        (
            night.began_at[:16].replace("T", " "),
            *(number(getattr(night, key), form) for key, (_, form) in METRICS.items()),
        )
        for night in reversed(found)
    ]


def series_of(found: Sequence[Night]) -> dict[str, tuple[tuple[int, float], ...]]:
    """METRICS by the number of the night, from 1."""
    values: Json = {
        key: [(step, getattr(night, key)) for step, night in enumerate(found, 1)] for key in METRICS
    }
    return {
        key: tuple((step, float(value)) for step, value in pairs if value is not None)
        for key, pairs in values.items()
    }


def _figure(found: Sequence[Night]) -> Figure:
    from matplotlib.ticker import MaxNLocator

    from tasks.reporting.charts import FIRST, WIDTH, labelled, new_figure

    figure, every = new_figure(WIDTH, 7.2, 4, 2)
    for axes, (key, points) in zip(every, series_of(found).items(), strict=True):
        axes.plot(*zip(*points or [(None, None)], strict=True), marker="o", color=FIRST)
        axes.set_ylim(bottom=0)
        axes.set_xlim(0.5, max(2, len(found)) + 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        labelled(axes, "night", METRICS[key][0].split(",")[0].replace(" than PyTorch", ""))
    return figure
