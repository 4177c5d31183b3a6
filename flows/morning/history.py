"""The refreshes of a root in order of start: `<root>/refreshes/<id>.began.json`, and `<id>.json` at
the end. A refresh that runs holds a lock on the first, which ends with its process. Light to
import."""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Literal

import fsspec
from pydantic import ValidationError

from kernels_eval.errors import UsageError
from kernels_eval.records import Record
from kernels_eval.written import json_of
from tasks.files import atomic_write_at, explain_write_errors
from tasks.reporting.text import moment
from tasks.store.snapshot import SnapshotRef

PLACE = "refreshes"
BEGAN, ENDED = ".began.json", ".json"
ERROR_CHARS = 2000
Ending = Literal["finished", "failed", "stopped", "killed", "running", "unknown"]
"""running: a process holds its lock. killed: begun, not ended, and no process does. unknown: begun,
where no lock can be asked for, such as behind a URL."""


class Refresh(Record):
    """One refresh. `snapshots` are by name (tasks, candidates, verdicts, ...), none unless it
    finished; times are UTC, ISO 8601."""

    id: str
    name: str
    language: str
    strategy: str
    began_at: str
    run_name: str = ""
    """the one that a person typed"""
    ending: Ending = "unknown"
    ended_at: str | None = None
    error: str = ""
    goes_on: str = ""
    """the command that resumes it"""
    snapshots: dict[str, SnapshotRef] = {}
    cautions: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The name that a person typed, the configuration's name, and when the refresh began."""
        return ", ".join(filter(None, (self.run_name, self.name, moment(self.began_at))))

    @property
    def seconds(self) -> float | None:
        """Wall time, s. None until it has ended."""
        if self.ended_at is None:
            return None
        began, ended = map(datetime.fromisoformat, (self.began_at, self.ended_at))
        return (ended - began).total_seconds()


class Entry:
    """A refresh that has begun; `ends` writes how it ended, once."""

    def __init__(self, root: str, begun: Refresh) -> None:
        self._root, self.begun = root, begun
        self.ended: Refresh | None = None

    def ends(self, ending: Ending, **found: Any) -> Refresh:
        moment = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.ended = self.begun.model_copy(update={"ending": ending, "ended_at": moment, **found})
        _write(self._root, self.ended, ENDED)
        return self.ended


@contextmanager
def entered(
    root: str,
    name: str,
    language: str,
    strategy: str,
    run_name: str = "",
    goes_on: str = "",
    stopped_by: Callable[[BaseException], str] = lambda stop: "an interrupt",
) -> Iterator[Entry]:
    """Record one refresh in the history: an exception as failed, an interrupt as stopped, and by
    whom; a block that ends without `ends` looks killed. Raises UsageError if the root cannot be
    written."""
    began = datetime.now(UTC)
    begun = Refresh(
        id=f"{began:%Y%m%dT%H%M%S%f}Z-{uuid.uuid4().hex[:8]}",
        name=name,
        language=language,
        strategy=strategy,
        run_name=run_name,
        goes_on=goes_on,
        began_at=began.isoformat(timespec="milliseconds"),
    )
    entry = Entry(root, begun)
    with _locked(_write(root, begun, BEGAN)):
        try:
            yield entry
        except BaseException as error:
            if entry.ended is None:
                with suppress(UsageError):  # the error itself says that the disk is full
                    if isinstance(error, Exception):
                        entry.ends("failed", error=f"{type(error).__name__}: {error}"[:ERROR_CHARS])
                    else:  # an interrupt of a terminal, or the signal of a cancellation
                        entry.ends("stopped", error=f"stopped by {stopped_by(error)}")
            raise


def refreshes(root: str) -> list[Refresh]:
    """Every refresh of a root, oldest first, without unreadable files. Snapshot paths are mapped to
    this root."""
    fs, folder = _located(root, PLACE)
    if not fs.exists(folder):
        return []
    found: dict[str, Refresh] = {}
    for begun in (True, False):  # what ended replaces what began, also a moment ago
        for path in fs.ls(folder, detail=False, refresh=True):
            name = path.rsplit("/", 1)[-1]
            if not name.endswith(ENDED) or name.startswith(".") or name.endswith(BEGAN) != begun:
                continue
            with suppress(OSError, ValueError, ValidationError):
                refresh = Refresh.model_validate(json_of(fs.cat_file(path)))
                moved = {
                    name: ref.model_copy(update={"root": str(root)})
                    for name, ref in refresh.snapshots.items()
                }
                changes: dict[str, Any] = {"snapshots": moved}
                if begun:
                    changes["ending"] = _state(path)
                found[refresh.id] = refresh.model_copy(update=changes)
    return [found[name] for name in sorted(found)]


def before(root: str, refresh: Refresh) -> tuple[Refresh | None, list[Refresh]]:
    """The last finished refresh of the same name and language before this one, and the unfinished
    ones between, of any name; without it, those of this name."""
    earlier = [each for each in refreshes(root) if each.id < refresh.id]
    same = [e for e in earlier if (e.name, e.language) == (refresh.name, refresh.language)]
    previous = next((each for each in reversed(same) if each.ending == "finished"), None)
    between = [each for each in earlier if each.id > previous.id] if previous else same
    return previous, [each for each in between if each.ending != "finished"]


def write_under(root: str, name: str, text: str) -> str:
    """Write a file under a root atomically, and return its path. Raises UsageError."""
    fs, target = _located(root, name)
    hint = "free some disk, or correct its permissions; what was already written is intact"
    with explain_write_errors(target, hint):
        atomic_write_at(fs, target, lambda handle: handle.write(text.encode("utf-8", "replace")))
    return target


def read_under(root: str, name: str) -> str:
    """A file under a root. Raises OSError."""
    fs, target = _located(root, name)
    return str(fs.cat_file(target).decode("utf-8"))


def _write(root: str, refresh: Refresh, suffix: str) -> str:
    text = json.dumps(refresh.model_dump(mode="json"), indent=2) + "\n"
    return write_under(root, f"{PLACE}/{refresh.id}{suffix}", text)


@contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold the lock of a refresh, where its file system has one."""
    handle = -1
    with suppress(OSError):
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if handle >= 0:
            os.close(handle)


def _state(path: str) -> Ending:
    """What the lock of a refresh that has begun says."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "running"
    except OSError:
        return "unknown"
    return "killed"


def _located(root: str, name: str) -> tuple[Any, str]:
    fs, path = fsspec.core.url_to_fs(str(root))
    return fs, f"{path.rstrip('/')}/{name}"
