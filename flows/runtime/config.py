"""How a run guards itself. Affects no snapshot's content, so no fingerprint."""

from __future__ import annotations

from pydantic import Field

from kernels_eval.records import Record


class GuardConfig(Record, title="Guard"):
    """Room on the disk."""

    reserve_gib: float = Field(default=2.0, ge=0, title="Disk reserve, GiB")
    """free space that a run leaves on every file system it writes to: below it, no run starts
    and a running one stops, resumable; 0: no check"""
