"""Copies of hub data on this disk, for the nights on which the hub cannot be reached.

Guarantees: a copy is of one commit, one split and some columns, and is there whole or not at all;
what is read has the digest that was noted when it was written; a copy that was damaged is passed
over. Keeps the newest few of each split. Does not guarantee that the commit is still the hub's
newest: that is what the caution says of whoever uses a copy.

Layout: `<cache>/hub/<owner>--<name>/<split>/<commit>.parquet` and `<commit>.json` (written last)
with digest, columns, rows and time. `<cache>` is $CONCUR_CACHE, else `concur` in the user's cache
directory.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kernels_eval.build.toolchain import default_cache
from kernels_eval.records import Record
from tasks.files import atomic_write

KEPT = 3
log = logging.getLogger(__name__)


class Pin(Record):
    """What is known of a copy. `commit` is the hub's, 40 hex digits; `fetched_at` is UTC, ISO
    8601."""

    hub_id: str
    split: str
    commit: str
    columns: tuple[str, ...]
    rows: int
    sha256: str
    fetched_at: str


def is_commit(revision: str | None) -> bool:
    return revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision) is not None


def keep(
    hub_id: str, split: str, commit: str, columns: Sequence[str], rows: list[dict[str, Any]]
) -> Pin | None:
    """Write a copy beside earlier ones; None where the disk does not take it, which is logged and
    costs the caller nothing."""
    import polars as pl

    folder = _folder(hub_id, split)
    target = folder / f"{commit}.parquet"
    try:
        frame = pl.DataFrame(rows, infer_schema_length=None).select(list(columns))
        atomic_write(target, lambda path: frame.write_parquet(path, compression="zstd"))
        pin = Pin(
            hub_id=hub_id,
            split=split,
            commit=commit,
            columns=tuple(columns),
            rows=len(rows),
            sha256=_digest(target),
            fetched_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        atomic_write(target.with_suffix(".json"), pin.model_dump_json(indent=2))
        for old in [each for each, _ in _copies(hub_id, split)][KEPT:]:
            (folder / f"{old.commit}.json").unlink(missing_ok=True)
            (folder / f"{old.commit}.parquet").unlink(missing_ok=True)
    except (OSError, pl.exceptions.PolarsError) as error:
        log.warning("no copy of %s at %s was kept: %s", hub_id, commit, error)
        return None
    return pin


def find(
    hub_id: str, split: str, revision: str | None, columns: Sequence[str]
) -> tuple[Pin, list[dict[str, Any]]] | None:
    """The copy of this commit, or where `revision` is no commit (a branch, None) the one fetched
    last. None where there is none."""
    import polars as pl

    for pin, path in _copies(hub_id, split):
        if is_commit(revision) and pin.commit != revision or not set(columns) <= set(pin.columns):
            continue
        try:
            if _digest(path) != pin.sha256:
                log.error(
                    "the copy %s is not what was written there (its digest differs): it is passed"
                    " over",
                    path,
                )
                continue
            return pin, pl.read_parquet(path, columns=list(columns)).to_dicts()
        except (OSError, pl.exceptions.PolarsError) as error:
            log.error("the copy %s cannot be read: %s", path, error)
    return None


def _copies(hub_id: str, split: str) -> list[tuple[Pin, Path]]:
    """All that are whole, the newest first."""

    def each() -> Iterator[tuple[Pin, Path]]:
        for note in _folder(hub_id, split).glob("*.json"):
            try:
                yield (
                    Pin.model_validate_json(note.read_text(encoding="utf-8")),
                    note.with_suffix(".parquet"),
                )
            except (OSError, ValueError) as error:
                log.error("the note of a copy, %s, cannot be read: %s", note, error)

    return sorted(each(), key=lambda found: found[0].fetched_at, reverse=True)


def _folder(hub_id: str, split: str) -> Path:
    return default_cache() / "hub" / hub_id.replace("/", "--") / re.sub(r"[^\w.-]", "_", split)


def _digest(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
