"""A curated set as a folder or on the hub, and what changed between two of them, by names and paths
as a user gives them.

A difference of two refreshes as Markdown and as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kernels_eval.errors import UsageError
from kernels_eval.tables import table_beside
from tasks.publishing.config import PUBLICATION, PublishOptions
from tasks.publishing.diff import RefreshDiff, diff
from tasks.publishing.hub import push_to_hub
from tasks.publishing.lineage import find_curated
from tasks.publishing.publish import Published, publish
from tasks.publishing.templates import render
from tasks.store import SnapshotRef

PUBLISHED = "published.jsonl"
"""What was published of a root's snapshots, one line each."""


def publish_set(
    root: str,
    out: str,
    *,
    curated: str | None = None,
    also: Sequence[str] = (),
    push: str | None = None,
    public: bool = False,
    observations: str | None = None,
    decontamination: str | None = None,
    figures: Sequence[str] = (),
    **options: Any,
) -> dict[str, Any]:
    """Publish, and push where `push` names a repository of the hub. Returns a summary.

    `curated` and `also` are fingerprints under `root` or directories, `observations` and
    `decontamination` Markdown files, `options` fields of PublishOptions. Raises UsageError as
    `publish` and `push_to_hub` do.
    """
    given = {name: value for name, value in options.items() if value is not None}
    try:
        chosen = PublishOptions.model_validate(given)
    except ValidationError as error:
        problem = error.errors()[0]
        raise UsageError(
            f"{'.'.join(map(str, problem['loc']))} = {problem['input']!r}: {problem['msg']}",
            "see concur publish -h",
        ) from error
    folder = Path(out).expanduser().absolute()
    first, *others = [find_curated(root, name) for name in (curated, *also)]
    published = publish(
        first,
        folder,
        chosen,
        strategies=others,
        observations=_text(observations),
        decontamination=_text(decontamination),
        figures=[Path(figure) for figure in figures],
    )
    for place in {ref.root for ref in (first, *others)}:
        _note(place, published, folder)
    pushed = push_to_hub(folder, push, private=not public) if push else None
    return {
        "folder": str(folder),
        **published.model_dump(include={"tag", "fingerprint", "curated"}),
        "rows": published.rows,
        "without_test": [
            name
            for name, splits in published.rows.items()
            if chosen.holdout_share and not splits.get("test")
        ],
        "files": len(published.files) + 1,
        "size_bytes": sum(file.size_bytes for file in published.files),
        "hub": pushed.model_dump() if pushed else None,
    }


def _note(root: str, published: Published, folder: Path) -> None:
    """Note beside the snapshots what was published of them: `concur gc` keeps it. A root that
    cannot be written to keeps no notes."""
    if "://" in root:
        return
    note = {"tag": published.tag, "folder": str(folder), "curated": published.curated}
    line, path = json.dumps(note) + "\n", Path(root).expanduser() / PUBLISHED
    with suppress(OSError):
        if not path.exists() or line not in path.read_text(encoding="utf-8"):
            with path.open("a", encoding="utf-8") as notes:
                notes.write(line)


def _text(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}",
            "give a Markdown file in UTF-8",
        ) from error


def diff_sets(root: str, old: str, new: str, *, as_json: bool = False) -> str:
    """What changed between two sets, each a published folder, a directory of a curated snapshot, or
    a fingerprint under `root`: Markdown, or one JSON object. Raises UsageError for what is none of
    them."""
    found = diff(_source(root, old), _source(root, new), root)
    return to_json(found) if as_json else to_markdown(found)


def _source(root: str, name: str) -> SnapshotRef | Path:
    return Path(name) if (Path(name) / PUBLICATION).is_file() else find_curated(root, name)


MAX_SHOWN = 50
_WORDS = table_beside(__file__)
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
