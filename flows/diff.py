"""Differences of two training sets, each a snapshot or a published folder, and their reasons."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.records import Json
from tasks.curation.diff import changes, reason_counts
from tasks.curation.stage import decisions_of
from tasks.files import explain_read_errors
from tasks.publishing.config import PUBLICATION
from tasks.publishing.lineage import CURATION, facts, find_curated, lineage, settings
from tasks.publishing.publish import is_whole, read_publication
from tasks.store import Snapshot
from tasks.store.snapshot import RESTORE
from tasks.typed import typed

STAGES = ("tasks", "synthesis", "verification", "curation", "tools")


class Side(NamedTuple):
    """One of two sets: name, manifests' facts, and decisions."""

    label: str
    facts: Json
    decisions: pl.DataFrame


def diff_sets(root: str, old: str, new: str) -> Json:
    """Compare two sets, each a published folder, a curated snapshot's directory, or a fingerprint
    under `root`.

    Returns `sets` (label, date, rows and tasks), differing `settings`, `reasons` (counts by change
    and reason), `tasks` gained and lost, and `samples` (`tasks.curation.diff.changes`).
    """
    sides = {"old": _side(root, old), "new": _side(root, new)}
    rows = changes(sides["old"].decisions, sides["new"].decisions)
    tasks = {name: set(_taken(side)["task_id"]) for name, side in sides.items()}
    return {
        "sets": [{"side": name, **_summary(side)} for name, side in sides.items()],
        "settings": _settings(sides["old"].facts, sides["new"].facts),
        "reasons": reason_counts(rows),
        "tasks": {
            "gained": len(tasks["new"] - tasks["old"]),
            "lost": len(tasks["old"] - tasks["new"]),
        },
        "samples": rows.to_dicts(),
    }


def _side(root: str, name: str) -> Side:
    if not (Path(name) / PUBLICATION).is_file():
        line = lineage(find_curated(root, name))
        label = f"{CURATION}/{line.curated.fingerprint}"
        return Side(label, facts(line), decisions_of(line.curated))
    published = read_publication(Path(name))
    if not is_whole(Path(name), published):
        raise UsageError(
            f"files of {name} are missing or have changed",
            f"publish it again, or restore what {PUBLICATION} lists",
        )
    known = Snapshot(root, CURATION, published.curated)
    if known.finished:
        return Side(published.tag, published.facts, decisions_of(known))
    with explain_read_errors(name, RESTORE):
        rows = typed(pl.read_parquet(Path(name) / "data" / "*.parquet"), name)
    return Side(published.tag, published.facts, rows.with_columns(taken=True))


def _taken(side: Side) -> pl.DataFrame:
    return side.decisions.filter("taken")


def _summary(side: Side) -> Json:
    rows = _taken(side)
    return {
        "label": side.label,
        "created_at": side.facts.get("created_at"),
        "rows": rows.height,
        "tasks": rows["task_id"].n_unique(),
    }


def _settings(old: Json, new: Json) -> list[Json]:
    found = []
    for stage in STAGES:
        before, after = (_texts(facts.get(stage)) for facts in (old, new))
        for name in sorted(before.keys() | after.keys()):
            values = {"old": before.get(name), "new": after.get(name)}
            if values["old"] != values["new"]:
                found.append({"name": f"{stage}.{name}", **values})
    return found


def _texts(values: Mapping[str, object] | None) -> dict[str, str]:
    return {name: str(value) for name, value in settings(values or {})}
