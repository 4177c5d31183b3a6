"""What lies under a root: its snapshots, finished or not, and the JSON files beside them that may
name some.

Guarantees: nothing is changed; a symbolic link is never followed, and what lies behind one is no
snapshot of this root; a directory is a finished snapshot only if its manifest names that very stage
and fingerprint, and an unfinished one only if its name is a fingerprint and a stage has begun to
write there. Whatever else is there is not looked at. Does not guarantee a picture of one moment
where others write: `sweep.alone` is for that.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import psutil

from kernels_eval.errors import UsageError
from kernels_eval.records import Record
from tasks.store.snapshot import MANIFEST

FINGERPRINT = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")
TRASH = ".gc-trash"
NOT_STAGES = ("prefect", "mlartifacts", "mlruns", "stack", "logs", "ray", TRASH)
NOTES_DEPTH = 3
NOTES_BYTES = 64 << 20  # a larger JSON file is data, and would be held in memory
WRITERS = re.compile(r"^\.(?:scratch-[0-9a-f]+-(\d+)|.+\.(\d+)\.tmp)$")
REPORTS = "report"
CHECKPOINTS = "checkpoints"


class Stored(Record):
    """One snapshot's directory. `names` are the fingerprints that its manifest and its reports
    name, `changed_s` is in Unix seconds."""

    stage: str
    fingerprint: str
    finished: bool
    upstream: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()
    changed_s: float
    bytes: int
    has_report: bool = False
    written_by: str = ""

    @property
    def place(self) -> str:
        return f"{self.stage}/{self.fingerprint}"


def scan(root: Path) -> list[Stored]:
    """Every snapshot under a root. Raises UsageError for a manifest that cannot be read: what its
    snapshot needs is then unknown."""
    found = []
    for stage in _directories(root):
        if stage.name.startswith(".") or stage.name in NOT_STAGES:
            continue
        for directory in _directories(stage):
            snapshot = _stored(stage.name, directory)
            if snapshot:
                found.append(snapshot)
    return found


def noted(root: Path) -> dict[str, str]:
    """Fingerprints named by JSON files of the root that belong to no snapshot (published folders,
    ablations), and by which file."""
    found: dict[str, str] = {}
    for path in _notes(root, NOTES_DEPTH):
        for name in _named_in(path):
            found.setdefault(name, f"named in {path.relative_to(root)}")
    return found


def size_of(path: Path) -> int:
    """Bytes that a file, or a directory with all that lies in it, takes on the disk; links count as
    links."""
    total = 0
    with suppress(OSError):
        total = path.lstat().st_blocks * 512
        if path.is_dir() and not path.is_symlink():
            total += sum(size_of(Path(entry)) for entry in os.scandir(path))
    return total


def _stored(stage: str, directory: Path) -> Stored | None:
    manifest = directory / MANIFEST
    if manifest.is_symlink() or not manifest.is_file():
        if not _half_written(directory):
            return None
        return Stored(
            stage=stage,
            fingerprint=directory.name,
            finished=False,
            changed_s=_newest_s(directory),
            bytes=size_of(directory),
            written_by=_writer(directory),
        )
    try:
        told = json.loads(manifest.read_text(encoding="utf-8"))
        if (told["stage"], told["fingerprint"]) != (stage, directory.name):
            return None
        upstream = tuple(str(name) for name in told["upstream"])
        created_s = datetime.fromisoformat(told["created_at"]).timestamp()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"the manifest of {directory} cannot be read ({type(error).__name__}: {error}), so"
            " nobody knows what it needs",
            "restore the manifest, or remove that directory yourself",
        ) from error
    reports = [path for path in _files(directory / REPORTS) if path.suffix == ".json"]
    names = _named_in(manifest).union(*map(_named_in, reports)) - {directory.name}
    return Stored(
        stage=stage,
        fingerprint=directory.name,
        finished=True,
        upstream=upstream,
        names=frozenset(names) | frozenset(upstream),
        changed_s=created_s,
        bytes=size_of(directory),
        has_report=bool(reports),
    )


def _half_written(directory: Path) -> bool:
    """Has a stage begun a snapshot here? Other directories, such as an ablation's, may be named by
    a fingerprint too."""
    if not FINGERPRINT.fullmatch(directory.name):
        return False
    begun = any(
        path.name.startswith((".journal-", "part-", ".part-")) for path in _files(directory)
    )
    return begun or any(path.name == CHECKPOINTS for path in _directories(directory))


def _writer(directory: Path) -> str:
    """Who writes to an unfinished snapshot now: a locked journal, or a temporary file of a process
    that lives. Empty: nobody seen."""
    for path in _files(directory):
        if path.name.startswith(".journal-"):
            with suppress(OSError), open(path, "rb") as handle:
                try:
                    fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return "its journal is open"
    with suppress(OSError):
        for entry in os.scandir(directory):
            if found := WRITERS.match(entry.name):
                pid = int(found[1] or found[2])
                if psutil.pid_exists(pid):
                    return f"process {pid} writes there"
    return ""


def _newest_s(directory: Path) -> float:
    """When anything in it changed last: a training writes to a checkpoint deep inside."""
    newest = 0.0
    with suppress(OSError):
        newest = directory.lstat().st_mtime
        for entry in os.scandir(directory):
            with suppress(OSError):
                inner = (
                    _newest_s(Path(entry))
                    if entry.is_dir(follow_symlinks=False)
                    else entry.stat(follow_symlinks=False).st_mtime
                )
                newest = max(newest, inner)
    return newest


def _named_in(path: Path) -> frozenset[str]:
    try:
        return frozenset(FINGERPRINT.findall(path.read_text(encoding="utf-8", errors="replace")))
    except FileNotFoundError:  # gone since it was listed
        return frozenset()
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}, and it may name snapshots",
            "mend its permissions",
        ) from error


def _notes(directory: Path, depth: int) -> Iterator[Path]:
    for path in _files(directory):
        if path.suffix in (".json", ".jsonl") and path.stat().st_size <= NOTES_BYTES:
            yield path
    for inner in _directories(directory) if depth > 1 else ():
        snapshot = (inner / MANIFEST).is_file() or _half_written(inner)
        if not snapshot and inner.name not in NOT_STAGES and not inner.name.startswith("."):
            yield from _notes(inner, depth - 1)


def _directories(path: Path) -> list[Path]:
    return _listed(path, lambda entry: entry.is_dir(follow_symlinks=False))


def _files(path: Path) -> list[Path]:
    return _listed(path, lambda entry: entry.is_file(follow_symlinks=False))


def _listed(path: Path, wanted: Callable[[os.DirEntry[str]], bool]) -> list[Path]:
    try:
        return (
            sorted(Path(entry) for entry in os.scandir(path) if wanted(entry))
            if not path.is_symlink()
            else []
        )
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UsageError(
            f"cannot look into {path}: {error.strerror}",
            "mend its permissions; what it holds may refer to others",
        ) from error
