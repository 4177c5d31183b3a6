"""`concur gc`: what lies under a root, what of it anything refers to, and, when asked to, the end
of the rest.

Guarantees: nothing is removed without `delete`; nothing is removed while MLflow cannot be asked,
unless told `without_mlflow`; what the decision was made on cannot change before it is carried out,
for the root is held meanwhile. Prefect's stored results are no references: they name snapshots, and
a flow that is handed one that is gone makes it again. So is everything that was removed and is
asked for again.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from flows.ops.gc_inventory import CHECKPOINTS, TRASH, noted, scan, size_of
from flows.ops.gc_plan import DAY_S, Decision, Keep, decide
from flows.ops.gc_references import Tracked, published, tracked, tracking_uri
from flows.ops.gc_remove import alone, discard, empty_trash
from kernels_eval.errors import EvalError, UsageError

LOGS = (("logs",), ("stack", "logs"))
LOG_DAYS = 30.0


def collect(
    root: str,
    *,
    keep: Keep,
    delete: bool = False,
    uri: str | None = None,
    without_mlflow: bool = False,
    publications: tuple[str, ...] = (),
    cache_limit_bytes: int | None = None,
    log_days: float = LOG_DAYS,
) -> dict[str, Any]:
    """Decide, and with `delete` carry it out. Returns plain data: every snapshot with its reason,
    and sizes in bytes.

    Raises UsageError for a root that is none, for manifests that cannot be read and while a run
    works there; EvalError where MLflow does not answer and something should be deleted.
    """
    if "://" in root:
        raise UsageError(
            f"root {root} is a URL",
            "gc needs a root on a disk of this machine; use the storage's own life cycle rules"
            " there",
        )
    home = Path(root).expanduser().absolute()
    if home.is_symlink() or not home.is_dir():
        raise UsageError(
            f"there is no directory {root}" if not home.is_symlink() else f"{root} is a link",
            "give the root itself with --root",
        )
    told, warnings = _asked(home, uri, without_mlflow, delete)
    with alone(home) if delete else nullcontext():
        now_s = time.time()
        # a release is taken only where MLflow was asked; what notes and folders name is named all
        # the same
        references = noted(home) | told.names | published(publications)
        decisions = decide(scan(home), references, keep, now_s, told.released)
        others = [*_checkpoints(home, decisions), *_logs(home, now_s - log_days * DAY_S)]
        leftover = size_of(home / TRASH) if (home / TRASH).is_dir() else 0
        if delete:
            going = [
                home / each.snapshot.stage / each.snapshot.fingerprint
                for each in decisions
                if not each.stays
            ]
            discard(home, [*(Path(other["path"]) for other in others), *going])
    undeleted = (
        empty_trash(home) if delete else 0
    )  # the root is free again: runs need not wait for a slow disk
    if undeleted:
        warnings.append(
            f"{undeleted} things in {home / TRASH} could not be deleted; the next gc tries again"
        )
    return {
        "root": str(home),
        "deleted": delete,
        "snapshots": [_told(each) for each in decisions],
        "others": others,
        "trash_bytes": leftover,
        "build_cache": _build_cache(cache_limit_bytes, delete),
        "mlflow": {
            "runs": told.runs,
            "registered_versions": told.versions,
            "asked": not without_mlflow and not warnings,
        },
        "freed_bytes": (
            sum(each.snapshot.bytes for each in decisions if not each.stays)
            + sum(one["bytes"] for one in others)
            + leftover
        ),
        "kept_bytes": sum(each.snapshot.bytes for each in decisions if each.stays),
        "warnings": warnings,
    }


def _asked(
    home: Path, uri: str | None, without_mlflow: bool, delete: bool
) -> tuple[Tracked, list[str]]:
    """What MLflow refers to. Where that is not known: an error with `delete`, a warning without."""
    if without_mlflow:
        return Tracked(), []
    place = tracking_uri(home, uri)
    try:
        if place is None:
            raise EvalError(
                f"no MLflow is known for {home}: it holds no mlflow.db, and MLFLOW_TRACKING_URI is"
                " not set",
                "name it with --tracking-uri, or decide without what it refers to:"
                " --without-mlflow",
            )
        return tracked(place), []
    except EvalError as error:
        if delete:
            raise
        return Tracked(), [
            f"{error}. Nothing can be deleted like this, and what only MLflow refers to is listed"
            " as going."
        ]


def _checkpoints(home: Path, decisions: list[Decision]) -> list[dict[str, Any]]:
    """Checkpoints of trainings that are finished and stay: nothing goes on from them, the adapter
    lies beside."""
    found = []
    for each in decisions:
        path = home / each.snapshot.stage / each.snapshot.fingerprint / CHECKPOINTS
        if each.stays and each.snapshot.finished and path.is_dir() and not path.is_symlink():
            found.append(
                {
                    "path": str(path),
                    "bytes": size_of(path),
                    "reason": "checkpoints of a finished training",
                }
            )
    return found


def _logs(home: Path, before_s: float) -> list[dict[str, Any]]:
    found = []
    for names in LOGS:
        folder = home.joinpath(*names)
        if any(parent.is_symlink() for parent in (folder, folder.parent)) or not folder.is_dir():
            continue
        for path in sorted(folder.iterdir()):
            if (
                ".log" in path.suffixes
                and path.is_file()
                and not path.is_symlink()
                and path.stat().st_mtime < before_s
            ):
                found.append(
                    {
                        "path": str(path),
                        "bytes": size_of(path),
                        "reason": "a log in which nothing was written for long",
                    }
                )
    return found


def _build_cache(limit_bytes: int | None, delete: bool) -> dict[str, int]:
    """What the build cache holds and may hold. It keeps to its limit when it stores; this does it
    now, or to another limit."""
    from kernels_eval.build.cache import BuildCache
    from kernels_eval.build.toolchain import default_cache

    cache = (
        BuildCache(default_cache())
        if limit_bytes is None
        else BuildCache(default_cache(), limit_bytes)
    )
    usage = cache.usage()
    told = {
        "entries": usage.entries,
        "bytes": usage.bytes,
        "limit_bytes": cache.limit_bytes,
        "removed_entries": 0,
    }
    if delete and 0 < cache.limit_bytes < usage.bytes:
        # not a method of the cache: every line of kernels_eval is part of every verdict's key, and
        # no verdict depends on this one
        cache._prepare()
        with cache._alone() as nobody_else:
            told["removed_entries"] = cache._evict() if nobody_else else 0
    return told


def _told(each: Decision) -> dict[str, Any]:
    one = each.snapshot
    return {
        "stage": one.stage,
        "fingerprint": one.fingerprint,
        "finished": one.finished,
        "bytes": one.bytes,
        "stays": each.stays,
        "reason": each.reason,
    }


def print_collected(data: dict[str, Any]) -> None:
    """Groups of stage and reason with their sizes, what goes first; then what was or would be
    freed."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    groups: dict[tuple[bool, str, str], list[int]] = defaultdict(list)
    for one in data["snapshots"]:
        reason = (
            "an upstream of what stays" if one["reason"].endswith(" needs it") else one["reason"]
        )
        groups[(one["stays"], one["stage"], reason)].append(one["bytes"])
    for one in data["others"]:
        groups[
            (
                False,
                Path(one["path"]).parent.name if one["reason"].startswith("a log") else "training",
                one["reason"],
            )
        ].append(one["bytes"])
    if data["trash_bytes"]:
        groups[(False, TRASH, "left by a gc that was interrupted")].append(data["trash_bytes"])
    went = "gone" if data["deleted"] else "would go"
    table = Table(title=f"concur gc {escape(data['root'])}")
    for column in ("", "stage", "why"):
        table.add_column(column, overflow="fold")
    table.add_column("number", justify="right")
    table.add_column("size", justify="right", no_wrap=True)
    for (stays, stage, reason), sizes in sorted(groups.items()):
        table.add_row(
            "stays" if stays else went,
            escape(stage),
            escape(reason),
            f"{len(sizes):,}",
            in_units(sum(sizes)),
        )
    Console(width=None if Console().is_terminal else 120).print(table)
    cache = data["build_cache"]
    limit = in_units(cache["limit_bytes"]) if cache["limit_bytes"] else "no limit"
    removed = f", {cache['removed_entries']} builds removed" if cache["removed_entries"] else ""
    print(
        f"build cache: {in_units(cache['bytes'])} in {cache['entries']:,} builds, limit"
        f" {limit}{removed}"
    )
    for warning in data["warnings"]:
        print(f"warning: {warning}")
    print(
        f"{'freed' if data['deleted'] else 'would free'} {in_units(data['freed_bytes'])},"
        f" {in_units(data['kept_bytes'])} of snapshots stay"
    )
    if not data["deleted"]:
        print("nothing was removed; add --delete to do it")


def in_units(size: float) -> str:
    """Bytes as a person reads them, decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"
