"""Snapshots, journals and fingerprints: how stages keep rows.

Stages and flows use the names below; `journal` and `parts` are details.
"""

from tasks.store.identity import fingerprint
from tasks.store.journal import another_runs
from tasks.store.lookup import known_rows, snapshots
from tasks.store.snapshot import ADAPTER, PART_ROWS, Snapshot, SnapshotRef

__all__ = [
    "ADAPTER",
    "PART_ROWS",
    "Snapshot",
    "SnapshotRef",
    "another_runs",
    "fingerprint",
    "known_rows",
    "snapshots",
]
