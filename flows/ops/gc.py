"""Garbage collection: what lies under a root, what of it is referred to, and, on request, removing
the rest.

Guarantees: nothing is removed without `delete`, nor while MLflow cannot be asked unless told
`without_mlflow`; the root is held from the decision until it is carried out; a snapshot is in its
place, whole, or gone, whenever the process is killed; what a killed collection left in the trash
goes with the next one; no link is followed and nothing outside the root is touched. Prefect's
stored results are no references: a flow that is handed a snapshot that is gone makes it again.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

from flows.ops.gc_inventory import (
    CHECKPOINTS,
    TRASH,
    Tracked,
    noted,
    published,
    scan,
    size_of,
    tracked,
)
from flows.ops.gc_plan import DAY_S, Decision, Keep, decide
from flows.runtime.root_lock import alone
from kernels_eval.compile.cache import BuildCache
from kernels_eval.errors import EvalError, UsageError
from kernels_eval.records import Json
from kernels_eval.toolchain import default_cache

LOGS = ("logs", "stack/logs")


def collect(
    root: str,
    *,
    keep: Keep,
    delete: bool = False,
    tracking_uri: str | None = None,
    without_mlflow: bool = False,
    published_folders: tuple[str, ...] = (),
    cache_limit_gb: float | None = None,
    log_days: float = 30.0,
) -> Json:
    """Decide, and with `delete` carry it out. Returns plain data: every snapshot with its reason,
    and sizes in bytes.

    Raises UsageError for a root that cannot be collected, for manifests that cannot be read and
    while a run works there; EvalError where MLflow does not answer and something should be deleted.
    """
    home = _home(root)
    named, warnings = Tracked(), []
    if not without_mlflow:
        try:
            named = tracked(home, tracking_uri)
        except EvalError as error:
            if delete:
                raise
            warnings.append(
                f"{error}. Until then nothing can be deleted, and the list of snapshots to delete"
                " includes those that only MLflow refers to."
            )
    asked = not without_mlflow and not warnings
    with alone(home) if delete else nullcontext():
        now_s = time.time()
        references = noted(home) | named.names | published(published_folders)
        decisions = decide(scan(home), references, keep, now_s, named.released)
        others: list[Json] = [
            {"path": str(path), "bytes": size_of(path), "reason": reason}
            for path, reason in _others(home, decisions, now_s - log_days * DAY_S)
        ]
        leftover = size_of(home / TRASH) if (home / TRASH).is_dir() else 0
        if delete:
            going = [home / each.snapshot.place for each in decisions if not each.stays]
            _discard(home, [*(Path(other["path"]) for other in others), *going])
    # the root is free again: runs need not wait for a slow disk
    if delete and (undeleted := _empty_trash(home)):
        warnings.append(f"{undeleted} items in {home / TRASH} could not be deleted; rerun gc")
    sizes = {True: 0, False: leftover + sum(one["bytes"] for one in others)}
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
        "others": others,
        "trash_bytes": leftover,
        "build_cache": _build_cache(cache_limit_gb, delete),
        "mlflow": {"runs": named.runs, "registered_versions": named.versions, "asked": asked},
        "freed_bytes": sizes[False],
        "kept_bytes": sizes[True],
        "warnings": warnings,
    }


def _home(root: str) -> Path:
    if "://" in root:
        raise UsageError(
            f"root {root} is a URL",
            "gc needs a root on a disk of this machine; use the storage's own life cycle rules"
            " there",
        )
    home = Path(root).expanduser().absolute()
    if home.is_symlink() or not home.is_dir():
        problem = f"{root} is a link" if home.is_symlink() else f"there is no directory {root}"
        raise UsageError(problem, "give the root itself with --root")
    return home


def _others(home: Path, decisions: list[Decision], before_s: float) -> Iterator[tuple[Path, str]]:
    """What goes beside snapshots: checkpoints of finished trainings that stay, from which no
    training resumes, and logs that nothing was written to since."""
    for each in decisions:
        path = home / each.snapshot.place / CHECKPOINTS
        if each.stays and each.snapshot.finished and path.is_dir() and not path.is_symlink():
            yield path, "checkpoints of a finished training"
    for folder in (home / name for name in LOGS):
        if folder.is_symlink() or folder.parent.is_symlink() or not folder.is_dir():
            continue
        for path in sorted(folder.iterdir()):
            regular = path.is_file() and not path.is_symlink()
            if regular and ".log" in path.suffixes and path.stat().st_mtime < before_s:
                yield path, "an old log"


def _build_cache(limit_gb: float | None, delete: bool) -> dict[str, int]:
    """What the build cache holds and may hold. It keeps to its limit when it stores; this does it
    now, or to another limit."""
    limit_bytes = None if limit_gb is None else int(limit_gb * 1e9)
    cache = BuildCache(default_cache(), limit_bytes)
    usage = cache.usage()
    return {
        "entries": usage.entries,
        "bytes": usage.bytes,
        "limit_bytes": cache.limit_bytes,
        "removed_entries": cache.trim() if delete and 0 < cache.limit_bytes < usage.bytes else 0,
    }


# -- removal, in two steps: one rename into the root's trash, then deletion there -----------------


def _discard(root: Path, paths: Iterable[Path]) -> None:
    """Move paths into the trash, in this order. Raises UsageError for one outside the root."""
    trash = root / TRASH
    if trash.is_symlink():
        raise UsageError(f"{trash} is a link", "remove it: gc moves nothing out of its root")
    trash.mkdir(exist_ok=True)
    for path in paths:
        if root.resolve() not in path.resolve().parents or path.is_symlink():
            raise UsageError(
                f"{path} is not inside {root}",
                "another program changes the root, or this is a bug; nothing more was removed",
            )
        try:
            path.rename(trash / f"{path.parent.name}-{path.name}-{uuid.uuid4().hex[:8]}")
        except OSError as error:
            raise UsageError(
                f"cannot move {path} into {trash}: {error.strerror}",
                "fix its permissions; the trash must lie on the same file system",
            ) from error


def _empty_trash(root: Path) -> int:
    """Delete what lies in the trash, whoever put it there. Returns how many things are left for the
    next collection."""
    trash = root / TRASH
    if trash.is_symlink() or not trash.is_dir():
        return 0
    for path in list(trash.iterdir()):
        with suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    left = len(list(trash.iterdir()))
    if not left:
        with suppress(OSError):
            trash.rmdir()
    return left
