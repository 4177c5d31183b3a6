"""A difference of two refreshes as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tasks.files import read_toml
from tasks.publishing.diff import RefreshDiff
from tasks.publishing.templates import render

MAX_SHOWN = 50
_WORDS = read_toml(Path(__file__).with_suffix(".toml"))
LOST: Mapping[str, str] = _WORDS["lost"]
GAINED: Mapping[str, str] = LOST | _WORDS["gained"]


def to_json(found: RefreshDiff) -> str:
    """One JSON object: the record, and counts by reason."""
    reasons = {
        f"{what}_{change}": found.reasons(getattr(found, f"{what}_{change}"))
        for what in ("samples", "tasks")
        for change in ("gained", "lost", "changed")
    }
    return json.dumps({**found.model_dump(mode="json"), "reasons": reasons}, ensure_ascii=False)


def to_markdown(found: RefreshDiff) -> str:
    """The same for readers: counts by reason, then the first 50 of each kind."""
    return render("diff.md.jinja", found=found, lost=LOST, gained=GAINED, shown=MAX_SHOWN)
