"""The words of the morning report. Pure: a Morning in, text out; what candidates, tasks or errors
wrote is shown as text, no more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tasks.progress import duration
from tasks.reporting.text import cell, table

if TYPE_CHECKING:
    from flows.morning.history import Refresh
    from flows.morning.morning import Change, Morning

ENDINGS = {
    "failed": "failed",
    "stopped": "was stopped",
    "unknown": "did not end: it was killed, or still runs",
}


def headline(morning: Morning) -> str:
    """One sentence."""
    refresh = morning.refresh
    if refresh.ending != "finished":
        return f"The refresh {ENDINGS[refresh.ending]}" + (
            f" after {duration(refresh.seconds)}." if refresh.seconds is not None else "."
        )
    took = f"in {duration(refresh.seconds or 0.0)}"
    if morning.compared_with is None:
        rows = {change.what: change.rows for change in morning.changes}
        counts = ", ".join(_some(rows[name], name) for name in rows)
        return f"First refresh of this name, {took}: {counts}."
    if morning.nothing_new:
        return f"Nothing new: everything was there already, {took}."
    new = [_some(change.new, change.what, "new ") for change in morning.changes if change.new]
    gone = [f"{_some(change.gone, change.what)} gone" for change in morning.changes if change.gone]
    return f"{'; '.join((', '.join(new), ', '.join(gone))).strip('; ')}; {took}."


def markdown(morning: Morning) -> str:
    return "\n\n".join(_parts(morning)) + "\n"


def _parts(morning: Morning) -> Iterator[str]:
    refresh, previous = morning.refresh, morning.compared_with
    yield f"# {cell(refresh.name)}, {_when(refresh.began_at)}"
    yield f"**{headline(morning)}**"
    about = f"Language {cell(refresh.language)}, strategy {cell(refresh.strategy)}."
    yield about + (
        f" Compared with the refresh of {_when(previous.began_at)}."
        if previous
        else " There is no finished refresh before it."
    )
    if refresh.error:
        yield (
            "## Why it"
            f" {'failed' if refresh.ending == 'failed' else 'ended'}\n\n{cell(refresh.error, 600)}"
        )
    if morning.unfinished:
        yield "## Refreshes since then that did not finish"
        yield "\n".join(_unfinished(each) for each in morning.unfinished)
    if morning.changes:
        yield "## What is new"
        yield "Nothing." if morning.nothing_new and previous else _changes(morning.changes)
    yield from _failures(morning)
    if morning.cautions:
        yield "## Cautions\n\n" + "\n".join(
            f"- {cell(caution, 400)}" for caution in morning.cautions
        )
    if refresh.ending == "finished":
        yield "## What it cost"
        yield _costs(morning)
        yield "## Snapshots"
        yield table(
            ("what", "snapshot"),
            [
                (cell(name), f"`{ref.stage}/{ref.fingerprint}`")
                for name, ref in refresh.snapshots.items()
            ],
        )


def _changes(changes: tuple[Change, ...]) -> str:
    rows = [
        (_words(change.what), f"{change.rows:,}", f"{change.new:,}", f"{change.gone:,}")
        for change in changes
    ]
    parts = [table(("", "now", "new", "gone"), rows)]
    for change in changes:
        if change.examples:
            more = "" if change.new <= len(change.examples) else ", ..."
            of = "" if change.what == "tasks" else " are of"
            parts.append(
                f"New {_words(change.what)}{of}: {', '.join(map(cell, change.examples))}{more}"
            )
        if change.reasons:
            reasons = [
                (("in" if reason.startswith("+") else "out"), cell(reason[2:]), f"{n:,}")
                for reason, n in change.reasons.items()
            ]
            parts.append(
                "Why samples came into the training set, or went out of it:\n\n"
                + table(("", "why", "samples"), reasons)
            )
    return "\n\n".join(parts)


def _failures(morning: Morning) -> Iterator[str]:
    if not morning.status_counts:
        return
    yield "## What failed, and why"
    statuses = sorted(morning.status_counts, key=lambda name: -morning.status_counts[name])
    rows = [
        (
            cell(name),
            f"{morning.status_counts[name]:,}",
            f"{morning.new_status_counts.get(name, 0):,}",
        )
        for name in statuses
    ]
    yield table(("verdict", "all", "new"), rows)
    if morning.reason_counts:
        yield f"Reasons of the new failures: {_counts(morning.reason_counts)}."
    if morning.errors:
        rows = [
            (f"{group.count:,}", cell(group.reason), cell(group.signature), f"{group.tasks:,}")
            for group in morning.errors
        ]
        yield "Their most frequent errors (names, numbers and paths are left out):\n\n" + table(
            ("count", "reason", "error", "tasks"), rows
        )


def _costs(morning: Morning) -> str:
    refresh = morning.refresh
    total = f"Wall time {duration(refresh.seconds or 0.0)}, {morning.gpu_hours:.2f} GPU-hours."
    if not morning.costs:
        return f"{total} No stage had work: every snapshot was there."
    rows = [
        (
            _words(cost.stage),
            duration(cost.wall_s),
            str(cost.devices or "-"),
            f"{cost.gpu_hours:.2f}",
            cell(cost.rests_on),
        )
        for cost in morning.costs
    ]
    return f"{total}\n\n" + table(("stage", "wall time", "devices", "GPU-hours", "rests on"), rows)


def _unfinished(refresh: Refresh) -> str:
    why = f": {cell(refresh.error, 300)}" if refresh.error else ""
    return f"- {_when(refresh.began_at)} {ENDINGS.get(refresh.ending, refresh.ending)}{why}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{cell(name)} {count:,}" for name, count in counts.items())


def _some(count: int, name: str, which: str = "") -> str:
    words = _words(name)
    return f"{count:,} {which}{words.removesuffix('s') if count == 1 else words}"


def _words(name: str) -> str:
    return {"curated": "training samples", "flags": "flags of traces"}.get(name, name)


def _when(moment: str) -> str:
    return moment[:16].replace("T", " ") + " UTC"
