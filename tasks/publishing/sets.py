"""Publish a curated set to a folder or the hub, by the user's names and paths."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kernels_eval.errors import UsageError
from tasks.publishing.config import PublishOptions
from tasks.publishing.hub import push_to_hub
from tasks.publishing.lineage import find_curated
from tasks.publishing.publish import Published, publish

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
    **options: Any,
) -> dict[str, Any]:
    """Publish, and push to hub repository `push` if given. Returns a summary.

    `curated` and `also` are fingerprints under `root` or directories. Raises UsageError as
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
        "size_bytes": sum((folder / path).stat().st_size for path in published.files),
        "hub": pushed.model_dump() if pushed else None,
    }


def _note(root: str, published: Published, folder: Path) -> None:
    """Note a publication under the root, if writable, so that `concur gc` keeps its snapshots."""
    if "://" in root:
        return
    note = {"tag": published.tag, "folder": str(folder), "curated": published.curated}
    line, path = json.dumps(note) + "\n", Path(root).expanduser() / PUBLISHED
    with suppress(OSError):
        if not path.exists() or line not in path.read_text(encoding="utf-8"):
            with path.open("a", encoding="utf-8") as notes:
                notes.write(line)
