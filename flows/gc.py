"""Garbage collection of snapshots by their manifests: keeps each stage's newest, young ones, and
what kept ones name.

Guarantees: removes nothing without `delete` or while a run works; follows no link; products go
before sources, each snapshot whole or gone.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from datetime import datetime
from graphlib import TopologicalSorter
from pathlib import Path

from flows.runtime.lock import alone
from kernels_eval.errors import UsageError
from kernels_eval.grouping import grouped
from kernels_eval.records import Json, Record
from kernels_eval.sandbox.trees import below, remove_tree
from kernels_eval.written import json_of
from tasks.store.snapshot import MANIFEST

DAY_S = 86_400.0
FINGERPRINT = re.compile(r"[0-9a-f]{32}")
TRASH = ".gc-trash"
BEGUN = (".journal-*", "part-*", ".part-*", "checkpoints")
"""File of a begun snapshot."""


class Stored(Record):
    """One snapshot's folder. `upstream` are fingerprints in its manifest; `changed_s` is in Unix
    seconds."""

    stage: str
    fingerprint: str
    finished: bool
    rows: int | None = None
    level: str = ""
    """of verdicts: "screened", "confirmed", or how many of the screened ones are confirmed"""
    upstream: tuple[str, ...] = ()
    changed_s: float
    bytes: int


class Decision(Record):
    """One snapshot: whether it stays, and why."""

    snapshot: Stored
    stays: bool
    reason: str


def collect(root: str, *, keep: int, younger_than_days: float, delete: bool = False) -> Json:
    """Decide, and with `delete` remove. Returns plain data: every snapshot with its reason, and
    sizes in bytes.

    Raises UsageError for an unsuitable root, unreadable manifests and while a run works there."""
    home = _home(root)
    with alone(home) if delete else nullcontext():
        decisions = decide(scan(home), keep, younger_than_days, time.time())
        if delete:
            _discard(home, [each.snapshot for each in decisions if not each.stays])
    if delete:  # the workspace is free again: runs need not wait for a slow disk
        remove_tree(home / TRASH)
    sizes = {True: 0, False: 0}
    for each in decisions:
        sizes[each.stays] += each.snapshot.bytes
    return {
        "root": str(home),
        "deleted": delete,
        "snapshots": [
            each.snapshot.model_dump(include={"stage", "fingerprint", "finished", "bytes"})
            | {"stays": each.stays, "reason": each.reason}
            for each in decisions
        ],
        "freed_bytes": sizes[False],
        "kept_bytes": sizes[True],
    }


def decide(
    there: Iterable[Stored], keep: int, younger_than_days: float, now_s: float
) -> list[Decision]:
    newest_first = sorted(there, key=lambda one: (one.changed_s, one.fingerprint), reverse=True)
    by_name = grouped((one.fingerprint, one) for one in newest_first)
    finished = grouped((one.stage, one) for one in newest_first if one.finished)
    reasons: dict[tuple[str, str], str] = {}
    waiting = [(one, f"of the newest {keep}") for each in finished.values() for one in each[:keep]]
    for one in newest_first:
        if now_s - one.changed_s < younger_than_days * DAY_S:
            waiting.append((one, f"younger than {younger_than_days:g} days"))
    for one, reason in waiting:  # it grows meanwhile
        if (one.stage, one.fingerprint) not in reasons:
            reasons[one.stage, one.fingerprint] = reason
            sources = [source for name in one.upstream for source in by_name.get(name, ())]
            waiting += [(source, "needed by another snapshot that stays") for source in sources]
    stay = [one for one in newest_first if (one.stage, one.fingerprint) in reasons]
    go = _products_first([one for one in newest_first if one not in stay])
    kept = [
        Decision(snapshot=one, stays=True, reason=reasons[one.stage, one.fingerprint])
        for one in stay
    ]
    return kept + [Decision(snapshot=one, stays=False, reason="old and not needed") for one in go]


def _products_first(going: list[Stored]) -> list[Stored]:
    named = {one.fingerprint: one for one in going}
    order = TopologicalSorter({name: one.upstream for name, one in named.items()}).static_order()
    return [named[name] for name in order if name in named][::-1]


def scan(root: Path) -> list[Stored]:
    """Every snapshot under a root. Raises UsageError for an unreadable manifest, as its needs are
    unknown."""
    return [
        stored
        for stage in sorted(root.iterdir())
        if stage.is_dir() and not stage.is_symlink() and not stage.name.startswith(".")
        for folder in sorted(stage.iterdir())
        if FINGERPRINT.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink()
        if (stored := _stored(folder))
    ]


def _stored(folder: Path) -> Stored | None:
    stage, fingerprint = folder.parent.name, folder.name
    files = [folder.lstat(), *_stats_below(folder)]
    changed_s = max(found.st_mtime for found in files)
    common = {
        "stage": stage,
        "fingerprint": fingerprint,
        "bytes": sum(found.st_blocks * 512 for found in files),
    }
    path = folder / MANIFEST
    if not path.exists():
        begun = any(found for name in BEGUN for found in folder.glob(name))
        return Stored(**common, finished=False, changed_s=changed_s) if begun else None
    try:
        manifest = json_of(path.read_text(encoding="utf-8"))
        if (manifest["stage"], manifest["fingerprint"]) != (stage, fingerprint):
            return None
        return Stored(
            **common,
            finished=True,
            rows=manifest["rows"],
            level=_level_of(manifest) if stage == "verification" else "",
            upstream=manifest["upstream"],
            changed_s=datetime.fromisoformat(manifest["created_at"]).timestamp(),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"cannot read the manifest of {folder} ({type(error).__name__}: {error}), so what it"
            " needs is unknown",
            "restore the manifest, or remove that folder yourself",
        ) from error


def _stats_below(folder: Path) -> Iterator[os.stat_result]:
    for entry in below(folder):
        with suppress(FileNotFoundError):  # a run writes there
            yield entry.stat(follow_symlinks=False)


def _level_of(manifest: Json) -> str:
    if confirmation := manifest.get("confirmation"):
        return f"screened, {confirmation['confirmed']:,} of {manifest['rows']:,} confirmed"
    config = manifest.get("config") or {}
    level = (config.get("eval") or {}).get("level")
    return "screened" if config.get("screen") or level == "screen" else "confirmed"


def _home(root: str) -> Path:
    home = Path(root).expanduser().absolute()
    if "://" in root or home.is_symlink() or not home.is_dir():
        raise UsageError(
            f"{root} is not a folder of this machine",
            "give the workspace itself with --root; for a URL use the storage's life cycle rules",
        )
    return home


def _discard(home: Path, going: list[Stored]) -> None:
    trash = home / TRASH
    if trash.is_symlink():
        raise UsageError(f"{trash} is a link", "remove it: gc moves nothing out of its workspace")
    trash.mkdir(exist_ok=True)
    for one in going:
        with suppress(FileNotFoundError):
            place = home / one.stage / one.fingerprint
            place.rename(trash / f"{one.stage}-{one.fingerprint}-{uuid.uuid4().hex[:8]}")
