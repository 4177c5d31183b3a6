"""Which tasks are held out, for publishing and training: seed and task_id alone decide, so adding
tasks moves none across."""

from __future__ import annotations

import hashlib


def place_of(task_id: str, seed: int) -> float:
    """A place in [0, 1), spread evenly over task ids; below the held-out share is held out."""
    digest = hashlib.sha256(f"{seed}/{task_id}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
