"""Tells a full disk from a fault of the candidate.

Guarantees: where a disk has no room, what fails on it is a `DiskFullError`; a candidate cannot
bring one about by what it makes a compiler say. Does not guarantee to notice a disk that was full
for a moment and has 2 GB free afterwards, unless the compiler said so and a quota is the reason.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kernels_eval.build.process import FILE_LIMIT_BYTES
from kernels_eval.errors import DiskFullError

ROOM_BYTES = 64 << 20  # with less free, a compiler's failure says nothing about its source
FULL = (errno.ENOSPC, errno.EDQUOT)
SAYS_FULL = re.compile(r"No space left on device|Disk quota exceeded")


@contextmanager
def blaming_the_disk(folder: Path) -> Iterator[None]:
    """Makes a DiskFullError of an OSError that says so."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise full(folder, str(error)) from error


def raise_if_full(folder: Path, log: str) -> None:
    """To be asked when a compiler that works in `folder` has failed. Raises DiskFullError where
    want of disk may be why.

    Its log (all of it) only makes the disk a suspect: with less free than the largest file that a
    compiler may write, or where a quota is used up. An empty one does too: it may be what could not
    be written.
    """
    free_bytes = shutil.disk_usage(folder).free
    suspect = SAYS_FULL.search(log) or not log.strip()
    if free_bytes < (FILE_LIMIT_BYTES if suspect else ROOM_BYTES) or (
        suspect and not _may_write(folder)
    ):
        raise full(folder, f"a compiler failed, and {free_bytes / 1e6:.0f} MB are free")


def full(folder: Path, cause: str) -> DiskFullError:
    return DiskFullError(
        f"the disk of {folder} is full: {cause}",
        "free disk space, or set CONCUR_CACHE to a folder on another disk",
    )


def _may_write(folder: Path) -> bool:
    """What is free may not be for us: quotas show only in an attempt."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            os.posix_fallocate(probe.fileno(), 0, ROOM_BYTES)
    except OSError as error:
        return error.errno not in FULL
    return True
