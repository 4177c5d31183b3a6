"""Atomic replacement of files and directories; tables beside the code.

Guarantees: readers find the old or the new content, never a part; it is on disk (fsync) first. A
kill leaves at most `.NAME.THREAD.PID.tmp`, which garbage collection knows.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from kernels_eval.errors import UsageError, cause_of
from kernels_eval.sandbox.trees import remove_tree

Content = str | bytes | Callable[[Path], object]
"""Text (UTF-8), bytes, or a function that writes the file at a path."""


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file. Raises OSError."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def temporary_name(path: Path) -> Path:
    """A thread's own name beside `path` for its replacement."""
    return path.with_name(f".{path.name}.{threading.get_ident()}.{os.getpid()}.tmp")


def atomic_write(path: Path, content: Content, *, mode: int | None = None) -> Path:
    """Replace a file whole or not at all, making missing parent directories. Returns `path`.

    `mode` is set before writing (0o600 for secrets). Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        _write(temporary, content, mode)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _write(temporary: Path, content: Content, mode: int | None) -> None:
    if callable(content):
        content(temporary)
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        return
    data = content.encode() if isinstance(content, str) else content
    with temporary.open("wb") as handle:
        if mode is not None:
            os.fchmod(handle.fileno(), mode)
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())


def atomic_write_at(fs: Any, target: str, write: Callable[[BinaryIO], object]) -> None:
    """Replace a file of an fsspec file system; `write` gets the open file. Raises OSError.

    Object stores rename by copying, but an object appears whole there.
    """
    folder, name = target.rsplit("/", 1)
    temporary = f"{folder}/{temporary_name(Path(name))}"
    fs.makedirs(folder, exist_ok=True)
    with fs.open(temporary, "wb") as handle:
        write(handle)
        handle.flush()
        with suppress(AttributeError, io.UnsupportedOperation):  # no local file
            os.fsync(handle.fileno())
    fs.mv(temporary, target)


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yield a directory that becomes `target` when the block ends, and vanishes if it raises.

    Raises OSError, also where `target` has content by then.
    """
    temporary = temporary_name(target)
    remove_tree(temporary)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        temporary.replace(target)
    finally:
        remove_tree(temporary)


def make_writable(directory: Path) -> Path:
    """Make a directory if needed, and try to write there. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    probe = directory / f".probe-{os.getpid()}"
    probe.touch()
    probe.unlink()
    return directory


@contextmanager
def explain_write_errors(path: object, hint: str) -> Iterator[None]:
    """Turn an OSError into a UsageError with the path, the cause and the fix."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}", hint) from error


@contextmanager
def explain_read_errors(what: object, fix: str) -> Iterator[None]:
    """Turn errors of the block's tables, damaged or gone, into a UsageError about `what`."""
    import polars as pl
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException, pl.exceptions.PolarsError) as error:
        raise UsageError(f"cannot read {what}: {cause_of(error)}", fix) from error
