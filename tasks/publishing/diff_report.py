"""A difference of two refreshes as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from tasks.publishing.diff import RefreshDiff, SampleChange, SideSummary, TaskChange
from tasks.reporting.text import cell, table

SHOWN = 50
LOST: Mapping[str, str] = {
    "task": "the task is gone from the source",
    "program": "the task's program changed",
    "generator": "the generator or its settings changed",
    "candidate": "the candidate is gone",
    "verdict": "the verdict changed",
    "strategy": "the strategy changed",
    "threshold": "a threshold of curation changed",
    "bound": "the lower bound of the speedup no longer meets the rule",
    "flag": "a flag of its reasoning keeps it out now",
    "speedup": "the speedup no longer meets the rule",
    "outdone": "another sample is shorter or faster now",
    "quota": "the quota of single operators was met without it",
    "samples": "other samples were taken",
    "criterion": "another rule took it",
    "unknown": "unknown",
}
GAINED: Mapping[str, str] = {
    **LOST,
    "task": "the task is new",
    "candidate": "the candidate is new",
    "bound": "the lower bound of the speedup now meets the rule",
    "flag": "a flag of its reasoning no longer keeps it out",
    "speedup": "the speedup now meets the rule",
    "outdone": "the sample that was shorter or faster no longer stands in its way",
    "quota": "the quota of single operators has room for it now",
}


def to_json(found: RefreshDiff) -> str:
    """One JSON object: the record, and counts by reason."""
    names = (
        "samples_gained",
        "samples_lost",
        "samples_changed",
        "tasks_gained",
        "tasks_lost",
        "tasks_changed",
    )
    reasons = {name: found.reasons(getattr(found, name)) for name in names}
    return json.dumps({**found.model_dump(mode="json"), "reasons": reasons}, ensure_ascii=False)


def to_markdown(found: RefreshDiff) -> str:
    """The same for readers: counts by reason, then the first 50 of each kind."""
    return "\n\n".join(_parts(found)) + "\n"


def _parts(found: RefreshDiff) -> Iterator[str]:
    yield "# What changed"
    sides = [
        (name, cell(side.label), cell(side.created_at), f"{side.rows:,}", f"{side.tasks:,}")
        for name, side in _sides(found)
    ]
    yield table(("", "set", "finished", "rows", "tasks"), sides)
    kinds = (
        ("Tasks gained", found.tasks_gained, GAINED),
        ("Tasks lost", found.tasks_lost, LOST),
        ("Tasks changed", found.tasks_changed, LOST),
        ("Samples gained", found.samples_gained, GAINED),
        ("Samples lost", found.samples_lost, LOST),
        ("Samples changed", found.samples_changed, LOST),
    )
    if not any(changes for _, changes, _ in kinds):
        yield "The two sets hold the same samples."
    else:
        yield table(
            ("", "count", "why"),
            [
                (title, f"{len(changes):,}", _why(found, changes, words))
                for title, changes, words in kinds
            ],
        )
    if found.settings:
        yield "## Settings and counts that differ"
        yield table(
            ("what", "old", "new"),
            [(cell(s.name), cell(s.old or "-"), cell(s.new or "-")) for s in found.settings],
        )
    for title, changes, words in kinds:
        if changes:
            yield f"## {title}"
            yield _listed(changes, words)


def _sides(found: RefreshDiff) -> tuple[tuple[str, SideSummary], ...]:
    return (("old", found.old), ("new", found.new))


def _why(
    found: RefreshDiff, changes: Sequence[SampleChange | TaskChange], words: Mapping[str, str]
) -> str:
    return (
        "; ".join(f"{words[reason]}: {count:,}" for reason, count in found.reasons(changes).items())
        or "-"
    )


def _listed(changes: Sequence[SampleChange | TaskChange], words: Mapping[str, str]) -> str:
    rows = []
    for change in changes[:SHOWN]:
        what = [cell(change.task_id)]
        if isinstance(change, SampleChange):
            what += [cell(change.candidate_id[:12]), cell(change.criterion)]
        else:
            what += [str(change.old_samples), str(change.new_samples)]
        rows.append((*what, words[change.reason], cell(change.detail, 240)))
    names = (
        ("task", "sample", "rule")
        if isinstance(changes[0], SampleChange)
        else ("task", "old rows", "new rows")
    )
    more = f"\n\nAnd {len(changes) - SHOWN:,} more: see the JSON." if len(changes) > SHOWN else ""
    return table((*names, "why", "in detail"), rows) + more
