"""Finished snapshots of verdicts and candidates in which an effect of length is planted, and a
configuration that analyses them quickly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.analysis_scale import planted_frame
from tasks.analysis.config import ObservationConfig
from tasks.store.snapshot import Snapshot, SnapshotRef
from tasks.tables import CANDIDATES, VERDICTS

QUICK = ObservationConfig(max_conditional_tasks=60, permutations=199)


def written(
    root: Path | str, name: str, rows: list[dict[str, Any]], schema: pa.Schema
) -> SnapshotRef:
    snapshot = Snapshot(str(root), name, f"fingerprint of {name}")
    snapshot.append(rows, schema)
    return snapshot.publish(config={}).ref


def planted(root: Path | str, rows: int = 600) -> tuple[SnapshotRef, SnapshotRef]:
    """Verdicts, and candidates the other way round."""
    table = [
        row | {"timing": row["speedup"] and {"speedup": row["speedup"]}}
        for row in planted_frame(rows, 0).to_dicts()
    ]
    return written(root, "verification", table, VERDICTS), written(
        root, "synthesis", table[::-1], CANDIDATES
    )
