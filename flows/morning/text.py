"""The morning report as Markdown and JSON: one table a section, one finding a row.

Pure. What candidates, tasks or errors wrote is shown as text and is never markup.
"""

from __future__ import annotations

from flows.morning.report import Change, Morning
from kernels_eval.records import Json
from tasks.benchmark.pages import Section, write_page
from tasks.benchmark.shown import table_of
from tasks.progress import duration
from tasks.reporting.page import Bullets, Table
from tasks.reporting.text import by_count, cut

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
    refresh, previous = morning.refresh, morning.compared_with
    compared_with = _moment(previous.began_at) if previous else "no earlier finished refresh"
    return write_page(
        "md",
        title=f"{refresh.name}, {_moment(refresh.began_at)}",
        facts=(refresh.language, refresh.strategy, f"compared with {compared_with}"),
        sentence=headline(morning),
        sections=_sections(morning),
        drawn={},
    )


def _sections(morning: Morning) -> list[Section]:
    what_to_do = Bullets(morning.next_steps)
    error = cut(morning.refresh.error, ERROR_CHARS)
    reasons = {why: n for change in morning.changes for why, n in change.reasons.items()}
    changes = table_of(
        morning.changes,
        {
            "what": lambda change: WORDS.get(change.what, change.what),
            "now": lambda change: f"{change.rows:,}",
            "new": lambda change: f"{change.new:,}",
            "gone": lambda change: f"{change.gone:,}",
            "examples of new ones": _examples,
        },
    )
    why_changed = Table(
        ("samples", "why", "number"),
        [
            ("in" if why.startswith("+") else "out", why[2:], f"{count:,}")
            for why, count in reasons.items()
        ],
    )
    unfinished = table_of(
        morning.unfinished,
        {
            "began": lambda refresh: _moment(refresh.began_at),
            "ending": lambda refresh: ENDINGS[refresh.ending],
            "error": lambda refresh: cut(refresh.error, ERROR_CHARS),
        },
    )
    verdicts = Table(
        ("verdict", "all", "new"),
        [
            (name, f"{count:,}", f"{morning.new_status_counts.get(name, 0):,}")
            for name, count in by_count(morning.status_counts)
        ],
    )
    failures = Table(
        ("reason", "new candidates"),
        [(reason, f"{count:,}") for reason, count in morning.reason_counts.items()],
    )
    errors = table_of(
        morning.errors,
        {
            "most frequent errors of new candidates": lambda group: group.signature,
            "reason": lambda group: group.reason,
            "count": lambda group: f"{group.count:,}",
            "tasks": lambda group: f"{group.tasks:,}",
        },
    )
    snapshots = Table(
        ("what", "snapshot"),
        [
            (name, f"{ref.stage}/{ref.fingerprint}")
            for name, ref in morning.refresh.snapshots.items()
        ],
    )
    return [
        Section("What to do", (what_to_do,) if morning.next_steps else ()),
        Section("What came", (changes, why_changed)),
        Section("What failed", (error, unfinished, verdicts, failures, errors)),
        Section("Cautions", (Bullets(morning.cautions),) if morning.cautions else ()),
        Section("Snapshots", (snapshots,)),
    ]


def _examples(change: Change) -> str:
    more = ", ..." if change.new > len(change.examples) > 0 else ""
    return ", ".join(change.examples) + more


def _moment(iso: str) -> str:
    return iso[:16].replace("T", " ") + " UTC"


def as_json(morning: Morning) -> Json:
    """The report as plain data."""
    return {
        "headline": headline(morning),
        "next_steps": list(morning.next_steps),
        "nothing_new": morning.nothing_new,
        "wall_s": morning.refresh.seconds,
        **morning.model_dump(mode="json"),
    }
