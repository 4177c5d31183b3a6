"""Publish a curated set to a folder or the hub, by the user's names and paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kernels_eval.settings import validated
from tasks.publishing.config import TEST, PublishOptions
from tasks.publishing.hub import push_to_hub
from tasks.publishing.lineage import find_curated
from tasks.publishing.publish import publish

NOTHING_HELD_OUT = "no task was held out, so there is no split test: raise --holdout"


def publish_set(
    root: str,
    out: str,
    *,
    curated: str | None = None,
    push: str | None = None,
    public: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Publish, and push to hub repository `push` if given. Returns a summary.

    `curated` is a fingerprint under `root` or a directory, `options` fields of PublishOptions. A
    set without a name has that of the repository or the folder.
    Raises UsageError as `publish` and `push_to_hub` do.
    """
    folder = Path(out).expanduser().absolute()
    given = {name: value for name, value in options.items() if value is not None}
    named = {"name": (push or folder.name).rpartition("/")[2]}
    chosen = validated(PublishOptions, named | given, "concur publish")
    published = publish(find_curated(root, curated), folder, chosen)
    untested = TEST not in published.rows
    pushed = push_to_hub(folder, push, private=not public) if push else None
    return {
        "folder": str(folder),
        **published.model_dump(include={"tag", "fingerprint", "curated"}),
        "rows": published.rows,
        "caution": NOTHING_HELD_OUT if chosen.holdout_share and untested else None,
        "files": len(published.files) + 1,
        "size_bytes": sum((folder / path).stat().st_size for path in published.files),
        "hub": pushed.model_dump() if pushed else None,
    }
