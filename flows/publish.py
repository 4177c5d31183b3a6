"""`concur publish` and `concur diff`: a curated set as a folder or on the hub, and what changed
between two of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kernels_eval.errors import UsageError
from tasks.publishing.hub import Pushed, push_to_hub
from tasks.publishing.lineage import find_curated
from tasks.publishing.publish import PUBLICATION, Published, PublishOptions, publish
from tasks.store.snapshot import SnapshotRef

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
    """Publish, and push where `push` names a repository of the hub. Returns a summary. `curated`
    and `also` are fingerprints under `root` or directories, `observations` and `decontamination`
    Markdown files, `options` fields of PublishOptions. Raises UsageError as `publish` and
    `push_to_hub` do."""
    try:
        chosen = PublishOptions.model_validate(
            {name: value for name, value in options.items() if value is not None}
        )
    except ValidationError as error:
        problem = error.errors()[0]
        raise UsageError(
            f"{'.'.join(map(str, problem['loc']))} = {problem['input']!r}: {problem['msg']}",
            "see concur publish -h",
        ) from error
    chosen_sets = [find_curated(root, name) for name in (curated, *also)]
    published = publish(
        chosen_sets[0],
        Path(out),
        chosen,
        strategies=chosen_sets[1:],
        observations=_text(observations),
        decontamination=_text(decontamination),
        figures=[Path(figure) for figure in figures],
    )
    for place in {ref.root for ref in chosen_sets}:
        _note(place, published, Path(out).expanduser().absolute())
    pushed = (
        push_to_hub(Path(out).expanduser().absolute(), push, private=not public) if push else None
    )
    return _summary(published, Path(out).expanduser().absolute(), pushed)


def _note(root: str, published: Published, folder: Path) -> None:
    """Beside the snapshots, what was published of them: `concur gc` keeps it. A root that cannot be
    written to keeps no notes."""
    if "://" in root:
        return
    line = (
        json.dumps({"tag": published.tag, "folder": str(folder), "curated": published.curated})
        + "\n"
    )
    path = Path(root).expanduser() / PUBLISHED
    with suppress(OSError):
        if not path.exists() or line not in path.read_text(encoding="utf-8"):
            with open(path, "a", encoding="utf-8") as notes:
                notes.write(line)


def _summary(published: Published, folder: Path, pushed: Pushed | None) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "tag": published.tag,
        "fingerprint": published.fingerprint,
        "curated": published.curated,
        "rows": published.rows,
        "files": len(published.files) + 1,
        "size_bytes": sum(file.size_bytes for file in published.files),
        "hub": pushed.model_dump() if pushed else None,
    }


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
    from tasks.publishing.diff import diff
    from tasks.publishing.diff_report import to_json, to_markdown

    found = diff(_source(root, old), _source(root, new), root)
    return to_json(found) if as_json else to_markdown(found)


def _source(root: str, name: str) -> SnapshotRef | Path:
    if (Path(name) / PUBLICATION).is_file():
        return Path(name)
    return find_curated(root, name)
