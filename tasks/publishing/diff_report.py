"""A difference of two refreshes as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from tasks.publishing.diff import RefreshDiff, SampleChange, TaskChange
from tasks.reporting.text import cell, table

MAX_SHOWN = 50
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
KINDS = {
    "tasks_gained": GAINED,
    "tasks_lost": LOST,
    "tasks_changed": LOST,
    "samples_gained": GAINED,
    "samples_lost": LOST,
    "samples_changed": LOST,
}
"""The words for the reasons of each kind of change."""


def to_json(found: RefreshDiff) -> str:
    """One JSON object: the record, and counts by reason."""
    names = sorted(KINDS, key=lambda name: name.startswith("tasks"))
    reasons = {name: found.reasons(getattr(found, name)) for name in names}
    return json.dumps({**found.model_dump(mode="json"), "reasons": reasons}, ensure_ascii=False)


def to_markdown(found: RefreshDiff) -> str:
    """The same for readers: counts by reason, then the first 50 of each kind."""
    return "\n\n".join(_parts(found)) + "\n"


def _parts(found: RefreshDiff) -> Iterator[str]:
    yield "# What changed"
    sides = [
        (name, cell(side.label), cell(side.created_at), f"{side.rows:,}", f"{side.tasks:,}")
        for name, side in (("old", found.old), ("new", found.new))
    ]
    yield table(("", "set", "finished", "rows", "tasks"), sides)
    counts, lists = [], []
    for name, words in KINDS.items():
        title, changes = name.replace("_", " ").capitalize(), getattr(found, name)
        reasons = found.reasons(changes).items()
        why = "; ".join(f"{words[reason]}: {count:,}" for reason, count in reasons)
        counts.append((title, f"{len(changes):,}", why or "-"))
        lists += [f"## {title}", _listed(changes, words)] if changes else []
    if lists:
        yield table(("", "count", "why"), counts)
    else:
        yield "The two sets hold the same samples."
    if found.settings:
        yield "## Settings and counts that differ"
        rows = [
            (cell(each.name), cell(each.old or "-"), cell(each.new or "-"))
            for each in found.settings
        ]
        yield table(("what", "old", "new"), rows)
    yield from lists


def _listed(changes: Sequence[SampleChange | TaskChange], words: Mapping[str, str]) -> str:
    rows, names = [], ("old rows", "new rows")
    for change in changes[:MAX_SHOWN]:
        if isinstance(change, SampleChange):
            names = ("sample", "rule")
            what = (cell(change.candidate_id[:12]), cell(change.criterion))
        else:
            what = (str(change.old_samples), str(change.new_samples))
        rows.append((cell(change.task_id), *what, words[change.reason], cell(change.detail, 240)))
    text = table(("task", *names, "why", "in detail"), rows)
    if len(changes) > MAX_SHOWN:
        text += f"\n\nAnd {len(changes) - MAX_SHOWN:,} more: see the JSON."
    return text
