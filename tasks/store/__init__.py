"""Snapshots, journals and fingerprints: how every stage keeps its rows.

The names below are what stages and flows use; `journal` and `parts` are details of snapshots.
"""

from tasks.store.identity import code_hash, fingerprint
from tasks.store.journal import another_runs
from tasks.store.ordering import rows_in_order, tables_in_order
from tasks.store.parts import combine_parts, present_columns
from tasks.store.snapshot import (
    BATCH_ROWS,
    MANIFEST,
    PART_ROWS,
    Snapshot,
    SnapshotRef,
    hardware,
    known_rows,
    snapshots,
    tool_versions,
)

__all__ = [
    "BATCH_ROWS",
    "MANIFEST",
    "PART_ROWS",
    "Snapshot",
    "SnapshotRef",
    "another_runs",
    "code_hash",
    "combine_parts",
    "fingerprint",
    "hardware",
    "known_rows",
    "present_columns",
    "rows_in_order",
    "snapshots",
    "tables_in_order",
    "tool_versions",
]
