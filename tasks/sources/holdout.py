"""Where a task lies when some are held out: one rule for what is published and what is trained on.

Guarantees: the place depends on the seed and the task's id alone, so more tasks move none across,
and equal seeds and shares hold out equal tasks wherever it is asked.
"""

from __future__ import annotations

import hashlib


def place_of(task_id: str, seed: int) -> float:
    """A place in [0, 1), spread evenly over task ids. A task is held out where it is below the
    share that shall be."""
    digest = hashlib.sha256(f"{seed}/{task_id}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
