"""The morning report as Markdown and JSON: one table a section, one finding a row.

Pure. What candidates, tasks or errors wrote is shown as text and is never markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from flows.morning.report import Change, Morning
from tasks.progress import duration
from tasks.reporting.text import cell, table

ENDINGS = {
    "finished": "finished",
    "failed": "failed",
    "stopped": "was stopped",
    "unknown": "did not end: it was killed, or still runs",
}
WORDS = {"curated": "training samples", "flags": "flags of traces"}
ERROR_CHARS = 600

Section = tuple[str, Sequence[str], Iterable[Sequence[object]]]
"""Title, columns and rows; left out where there are no rows."""


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


def markdown(morning: Morning) -> str:
    """The whole report as a page."""
    refresh = morning.refresh
    parts = [f"# {cell(refresh.name)}, {_when(refresh.began_at)}", f"**{headline(morning)}**"]
    for title, columns, values in _sections(morning):
        rows = [[cell(value, ERROR_CHARS) for value in row] for row in values]
        if rows:
            parts += [f"## {title}", table(columns, rows)]
    return "\n\n".join(parts) + "\n"


def as_json(morning: Morning) -> dict[str, Any]:
    """The report as plain data."""
    return {
        "headline": headline(morning),
        "nothing_new": morning.nothing_new,
        "gpu_hours": round(morning.gpu_hours, 4),
        "wall_s": morning.refresh.seconds,
        **morning.model_dump(mode="json"),
    }


def _sections(morning: Morning) -> Iterator[Section]:
    changes, new_counts = morning.changes, morning.new_status_counts
    statuses = sorted(morning.status_counts.items(), key=lambda item: -item[1])
    yield "The refresh", ("what", "value"), _about(morning)
    yield (
        "Refreshes since then that did not finish",
        ("began", "ending", "error"),
        [(_when(one.began_at), ENDINGS[one.ending], one.error) for one in morning.unfinished],
    )
    yield (
        "What is new",
        ("what", "now", "new", "gone", "new ones are (of)"),
        [
            (_words(one), f"{one.rows:,}", f"{one.new:,}", f"{one.gone:,}", _of(one))
            for one in changes
        ],
    )
    yield (
        "Why the training set changed",
        ("samples", "why", "number"),
        [
            ("in" if reason.startswith("+") else "out", reason[2:], f"{count:,}")
            for one in changes
            for reason, count in one.reasons.items()
        ],
    )
    yield (
        "Verdicts",
        ("verdict", "all", "new"),
        [(name, f"{count:,}", f"{new_counts.get(name, 0):,}") for name, count in statuses],
    )
    yield (
        "Why new candidates failed",
        ("reason", "number"),
        [(reason, f"{count:,}") for reason, count in morning.reason_counts.items()],
    )
    yield (
        "Most frequent errors of new candidates (without names, numbers and paths)",
        ("count", "reason", "error", "tasks"),
        [(f"{one.count:,}", one.reason, one.signature, f"{one.tasks:,}") for one in morning.errors],
    )
    yield "Cautions", ("caution",), [(caution,) for caution in morning.cautions]
    yield (
        "What it cost",
        ("stage", "wall time", "devices", "GPU-hours", "rests on"),
        [
            (
                one.stage,
                duration(one.wall_s),
                one.devices or "-",
                f"{one.gpu_hours:.2f}",
                one.rests_on,
            )
            for one in morning.costs
        ],
    )
    snapshots = morning.refresh.snapshots.items()
    yield (
        "Snapshots",
        ("what", "snapshot"),
        [(name, f"{ref.stage}/{ref.fingerprint}") for name, ref in snapshots],
    )


def _about(morning: Morning) -> Iterator[tuple[str, object]]:
    refresh, previous = morning.refresh, morning.compared_with
    yield "language", refresh.language
    yield "strategy", refresh.strategy
    yield "compared with", _when(previous.began_at) if previous else "no finished refresh before it"
    yield "ending", ENDINGS[refresh.ending]
    if refresh.error:
        yield "error", refresh.error
    yield "wall time", duration(refresh.seconds) if refresh.seconds is not None else "-"
    yield "GPU time", f"{morning.gpu_hours:.2f} GPU-hours"


def _of(change: Change) -> str:
    more = ", ..." if change.new > len(change.examples) > 0 else ""
    return ", ".join(change.examples) + more


def _some(count: int, change: Change, which: str = "") -> str:
    words = _words(change)
    return f"{count:,} {which}{words.removesuffix('s') if count == 1 else words}"


def _words(change: Change) -> str:
    return WORDS.get(change.what, change.what)


def _when(moment: str) -> str:
    return moment[:16].replace("T", " ") + " UTC"
