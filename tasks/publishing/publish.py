"""A curated snapshot as a folder that `datasets.load_dataset`, polars and DuckDB read without our
code.

Layout: `data/train-00000-of-0000N.parquet` (and `test-...`), `README.md` (the card), and
`publication.json`: origin, revision, and files' SHA-256.

Guarantees: folders are atomic; only an earlier publication is replaced; equal snapshots, options
and code give equal bytes and revision.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import polars as pl
from pydantic import ValidationError

from kernels_eval.errors import UsageError
from kernels_eval.records import Json, Record, stable_hash
from kernels_eval.sandbox.trees import below, remove_tree
from tasks.files import explain_write_errors, file_sha256
from tasks.publishing.card import Card, card
from tasks.publishing.config import DATA, PUBLICATION, README, PublishOptions
from tasks.publishing.lineage import analysis_of, facts, lineage
from tasks.publishing.rows import published_rows, splits_of
from tasks.store import SnapshotRef
from tasks.versions import PUBLISHING_VERSION

SHARD_BYTES = 300 * 2**20
WRITE_FIX = (
    "choose another --out, free some disk, or change its permissions; what was published there"
    " before is intact"
)


class Published(Record):
    """A published folder. `tag` is its revision, also the hub's git tag; `fingerprint` identifies
    its content; `rows` by split; `files` maps paths to SHA-256."""

    tag: str
    fingerprint: str
    created_at: str
    curated: str
    facts: Json
    options: PublishOptions
    rows: dict[str, int]
    files: dict[str, str]


def publish(curated: SnapshotRef, out: Path, options: PublishOptions | None = None) -> Published:
    """Publish a curated snapshot to `out`.

    The card has the observations of the set's analysis, if any. Raises UsageError for a snapshot
    that cannot be published, and where `out` has other content or cannot be written.
    """
    options, out = options or PublishOptions(), out.expanduser().absolute()
    line = lineage(curated)
    known, created_at = facts(line), line.manifest["created_at"]
    analysis = analysis_of(line)
    observations = tuple(analysis.manifest["finding"]) if analysis else ()
    identity = [options.model_dump(mode="json"), known, observations, PUBLISHING_VERSION]
    fingerprint = stable_hash(identity)
    tag = f"refresh-{created_at[:10]}-{fingerprint[:8]}"
    there = _replaceable(out)
    if there and there.fingerprint == fingerprint and is_whole(out, there):
        return there
    folder = out.parent / f".{out.name}.new"
    with explain_write_errors(out, WRITE_FIX):
        remove_tree(folder)
        folder.mkdir(parents=True)
    try:
        splits = splits_of(published_rows(line), options)
        with explain_write_errors(out, WRITE_FIX):
            for split, rows in splits.items():
                _write(rows, folder / DATA, split)
            text = card(Card(options, tag, splits, known, observations))
            (folder / README).write_text(text, "utf-8")
            published = Published(
                tag=tag,
                fingerprint=fingerprint,
                created_at=created_at,
                curated=line.curated.fingerprint,
                facts=known,
                options=options,
                rows={split: rows.height for split, rows in splits.items()},
                files={path: file_sha256(folder / path) for path in sorted(_files_in(folder))},
            )
            (folder / PUBLICATION).write_text(published.model_dump_json(indent=2) + "\n", "utf-8")
            remove_tree(out)
            folder.rename(out)
    finally:
        remove_tree(folder)
    return published


def read_publication(folder: Path) -> Published:
    """A folder's publication record. Raises UsageError where it is none."""
    try:
        return Published.model_validate_json((folder / PUBLICATION).read_text("utf-8"))
    except OSError as error:
        raise UsageError(
            f"{folder} is no published set: {error.strerror or error}",
            "give a folder that `concur publish` made",
        ) from error
    except (ValidationError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{folder / PUBLICATION} cannot be read", "publish again into another folder"
        ) from error


def is_whole(folder: Path, published: Published) -> bool:
    return all(
        (folder / path).is_file() and file_sha256(folder / path) == digest
        for path, digest in published.files.items()
    )


def _write(rows: pl.DataFrame, directory: Path, split: str) -> None:
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    directory.mkdir(parents=True, exist_ok=True)
    dataset = Dataset.from_polars(rows)
    count = max(1, -(-int(rows.estimated_size()) // SHARD_BYTES))
    for number in range(count):
        name = f"{split}-{number:05d}-of-{count:05d}.parquet"
        shard = dataset.shard(count, number, contiguous=True)
        shard.to_parquet(str(directory / name))


def _replaceable(out: Path) -> Published | None:
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UsageError(f"{out} is not a folder", "choose another --out")
    if not out.exists() or not any(out.iterdir()):
        return None
    hint = "choose another --out: only a folder that `concur publish` made is replaced"
    if not (out / PUBLICATION).is_file():
        raise UsageError(f"{out} contains other files", hint)
    published = read_publication(out)
    if others := sorted(set(_files_in(out)) - {PUBLICATION, *published.files}):
        raise UsageError(
            f"{out} also holds files that are not of the published set, such as {others[0]}", hint
        )
    return published


def _files_in(folder: Path) -> Iterator[str]:
    for entry in below(folder):
        if not entry.is_dir(follow_symlinks=False):
            yield Path(entry.path).relative_to(folder).as_posix()
