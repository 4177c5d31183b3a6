"""Snapshots under a root: all of a stage, the newest, one by name, and rows of any. Nothing is
written, except that `known_rows` saves journals of killed runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec

from kernels_eval.errors import UsageError
from kernels_eval.records import Json
from tasks.store.snapshot import MANIFEST, Snapshot, SnapshotRef

if TYPE_CHECKING:
    import pyarrow as pa


def snapshots(root: str, stage: str) -> list[Snapshot]:
    """Every snapshot of a stage under a root, finished or not, in no particular order."""
    fs, path = fsspec.core.url_to_fs(str(root))
    base = f"{path.rstrip('/')}/{stage}"
    if not fs.exists(base):
        return []
    names = [Path(p).name for p in sorted(fs.ls(base, detail=False))]
    return [Snapshot(root, stage, name) for name in names if not name.startswith(".")]


def newest_first(root: str, stage: str) -> list[Snapshot]:
    finished = [each for each in snapshots(root, stage) if each.finished]
    age = {each.fingerprint: (each.manifest["created_at"], each.fingerprint) for each in finished}
    return sorted(finished, key=lambda each: age[each.fingerprint], reverse=True)


def find_snapshot(root: str, name: str, stage: str = "*") -> SnapshotRef:
    """A snapshot by its directory or, under `root`, by a prefix of its fingerprint. Raises
    UsageError where none or several match."""
    if (Path(name) / MANIFEST).is_file():
        path = Path(name).resolve()
        return SnapshotRef(
            root=str(path.parent.parent), stage=path.parent.name, fingerprint=path.name
        )
    fs, base = fsspec.core.url_to_fs(str(root))
    below = f"{base.rstrip('/')}/{stage}/{escape(name)}*"
    files = [path for inner in (MANIFEST, "part-*") for path in fs.glob(f"{below}/{inner}")]
    found = sorted({path.rpartition("/")[0] for path in files})
    if len(found) != 1:
        what = "snapshot" if stage == "*" else f"{stage} snapshot"
        problem = f"{len(found)} {what}s" if found else f"no {what}"
        raise UsageError(
            f"{problem} under {root} begin{'' if found else 's'} with {name!r}",
            "give its directory or more of its fingerprint; `concur ls` lists them",
        )
    *_, stage, fingerprint = found[0].split("/")
    return SnapshotRef(root=root, stage=stage, fingerprint=fingerprint)


def known_rows(
    of: Snapshot, column: str, keys: Iterable[str], schema: pa.Schema, *, own: bool = False
) -> Iterator[Json]:
    """Rows of the other snapshots of its stage (`own`: also its own) with one of these keys, each
    once, those in journals of killed runs included."""
    import polars as pl

    missing = pl.DataFrame({column: pl.Series(list(keys), dtype=pl.String)}).unique()
    for snapshot in snapshots(of.root, of.stage):
        if missing.is_empty():
            return
        if snapshot.fingerprint == of.fingerprint and not own:
            continue
        snapshot.save_journals(schema)
        if not snapshot.has_column(column):
            continue
        found = (
            snapshot.index([column])
            .join(missing, on=column, how="semi")
            .unique(subset=column, keep="first", maintain_order=True)
        )
        missing = missing.join(found, on=column, how="anti")
        yield from snapshot.rows_of(found)
