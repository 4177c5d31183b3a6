"""Folders that may hold what a candidate left: removed and measured whatever is in them.

Nothing recurses, so that depth ends no process, and names are given relative to a descriptor: paths
may be longer than PATH_MAX. Links are never followed.
"""

from __future__ import annotations

import fnmatch
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_HANDLE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_VANISHED = (FileNotFoundError, NotADirectoryError)

Identity = tuple[int, int]


def remove_tree(folder: str | os.PathLike[str]) -> None:
    """Remove a folder with all that is in it, as far as rights allow. Raises nothing for what is
    there, or is not.
    """
    with suppress(OSError):
        _empty(_opened(os.fspath(folder)))
        os.rmdir(folder)


def _empty(here: int) -> None:
    """Empty an open folder, and close it.

    Holds one folder at a time: from a subfolder it goes on in "..", as long as that is still the
    folder it came from.
    """
    trail: list[tuple[Identity, str]] = []
    """Of each folder between the first and this one: its parent, and its name there."""
    waiting = [_unlinked_files(here)]
    try:
        while waiting[-1] or trail:
            if waiting[-1]:
                name = waiting[-1].pop()
                with suppress(OSError):
                    below = _opened(name, here)
                    trail.append((_identity(here), name))
                    here = _exchanged(here, below)
                    waiting.append(_unlinked_files(here))
                continue
            waiting.pop()
            parent, name = trail.pop()
            here = _exchanged(here, os.open("..", _FOLDER, dir_fd=here))
            if _identity(here) != parent:
                return
            with suppress(OSError):
                os.rmdir(name, dir_fd=here)
    finally:
        os.close(here)


def _exchanged(old: int, new: int) -> int:
    os.close(old)
    return new


def _opened(name: str, where: int | None = None) -> int:
    """A folder, opened for reading and writing whatever its mode was. Raises OSError."""
    handle = os.open(name, _HANDLE, dir_fd=where)
    try:
        with suppress(OSError):  # another user's
            os.chmod(f"/proc/self/fd/{handle}", 0o700)
        return os.open(".", _FOLDER, dir_fd=handle)
    finally:
        os.close(handle)


def _unlinked_files(folder: int) -> list[str]:
    with suppress(OSError), os.scandir(folder) as found:
        entries = list(found)
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        for name in {entry.name for entry in entries}.difference(names):
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)
        return names
    return []


def _identity(folder: int) -> Identity:
    found = os.fstat(folder)
    return found.st_dev, found.st_ino


@contextmanager
def temporary_tree(prefix: str, home: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """A new folder, gone at the end. Raises OSError where none can be made."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=home))
    try:
        yield folder
    finally:
        remove_tree(folder)


def below(folder: str | os.PathLike[str]) -> Iterator[os.DirEntry[str]]:
    """All that is in a folder and its subfolders, at any depth; what cannot be read is left out."""
    todo = [os.fspath(folder)]
    while todo:
        with suppress(OSError), os.scandir(todo.pop()) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    todo.append(entry.path)


def named(folder: str | os.PathLike[str], pattern: str) -> list[Path]:
    """The files below a folder whose names match, sorted."""
    found = (entry.path for entry in below(folder) if fnmatch.fnmatchcase(entry.name, pattern))
    return sorted(path for path in map(Path, found) if path.is_file())


def disk_usage(folder: Path, most_files: int) -> tuple[int, int]:
    """Allocated bytes and number of files below a folder. Stops counting past `most_files`, and
    returns more than that where something cannot be counted: a folder without rights, or one below
    a path longer than PATH_MAX."""
    size = count = 0
    todo = [str(folder)]
    while todo:
        try:
            with os.scandir(todo.pop()) as entries:
                for entry in entries:
                    count += 1
                    if count > most_files:
                        return size, count
                    with suppress(*_VANISHED):
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            todo.append(entry.path)
        except _VANISHED:  # it was removed, or replaced, meanwhile
            continue
        except OSError:
            return size, most_files + 1
    return size, count
