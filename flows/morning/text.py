"""The morning report as Markdown and JSON: one table a section, one finding a row.

Pure. What candidates, tasks or errors wrote is shown as text and is never markup.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Template
from markupsafe import Markup

from flows.morning.report import Change, Morning
from kernels_eval.records import Json
from tasks.progress import duration
from tasks.reporting.templates import environment
from tasks.reporting.text import cell

ENDINGS = {
    "finished": "finished",
    "failed": "failed",
    "stopped": "was stopped",
    "unknown": "did not end: it was killed or is still running",
}
WORDS = {"curated": "training samples", "flags": "flags of traces"}
ERROR_CHARS = 600


def headline(morning: Morning) -> str:
    """The report in one sentence."""
    refresh = morning.refresh
    took = duration(refresh.seconds or 0.0)
    if refresh.ending != "finished":
        after = f" after {took}." if refresh.seconds is not None else "."
        return f"The refresh {ENDINGS[refresh.ending]}{after}"
    if morning.compared_with is None:
        counts = ", ".join(_some(change.rows, change) for change in morning.changes)
        return f"First refresh of this name, in {took}: {counts}."
    if morning.nothing_new:
        return f"Nothing new: all snapshots existed already, in {took}."
    new = [_some(change.new, change, "new ") for change in morning.changes if change.new]
    gone = [f"{_some(change.gone, change)} gone" for change in morning.changes if change.gone]
    return f"{', '.join([*new, *gone])}; in {took}."


def _some(count: int, change: Change, which: str = "") -> str:
    words = WORDS.get(change.what, change.what)
    return f"{count:,} {which}{words.removesuffix('s') if count == 1 else words}"


def markdown(morning: Morning) -> str:
    """The whole report as a page."""
    return _template().render(
        morning=morning,
        refresh=morning.refresh,
        previous=morning.compared_with,
        headline=headline(morning),
        reasons={why: n for change in morning.changes for why, n in change.reasons.items()},
        endings=ENDINGS,
        words=WORDS,
    )


@cache
def _template() -> Template:
    def shown(value: object) -> Markup:
        return value if isinstance(value, Markup) else Markup(cell(value, ERROR_CHARS))

    made = environment(
        Path(__file__).parent / "templates",
        filters={
            "duration": duration,
            "number": "{:,}".format,
            "when": lambda moment: moment[:16].replace("T", " ") + " UTC",
        },
        autoescape=True,
        finalize=shown,
        keep_trailing_newline=True,
    )
    return made.get_template("morning.md.j2")


def as_json(morning: Morning) -> Json:
    """The report as plain data."""
    return {
        "headline": headline(morning),
        "nothing_new": morning.nothing_new,
        "gpu_hours": round(morning.gpu_hours, 4),
        "wall_s": morning.refresh.seconds,
        **morning.model_dump(mode="json"),
    }
