"""A finished workspace: status and reason by candidate, the training set, and the scores shown.

Reads Parquet alone, so that a workspace of any version can be compared: record with one workspace,
compare with another.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl

from tests.support.oracle.inputs import Inputs


def section(inputs: Inputs) -> Any:
    root = inputs.workspace()
    verdicts = _rows(root, "verification", ("status", "reason"))
    return {
        "verdicts": {name: " ".join(row) for name, row in verdicts.items()},
        "candidates": sorted(_rows(root, "synthesis", ("task_id",))),
        "tasks": sorted(_ids(root, "tasks")),
        "training tasks": sorted(_ids(root, "training-tasks")),
        "training set": sorted(_rows(root, "curation", ("criterion",))),
    }


def _parts(root: Path, stage: str) -> list[Path]:
    """Parts of every finished snapshot of a stage."""
    found = []
    for manifest in sorted((root / stage).glob("*/manifest.json")):
        json.loads(manifest.read_text())
        found += sorted(manifest.parent.glob("part-*.parquet"))
    return found


def _rows(root: Path, stage: str, columns: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    found = {}
    for part in _parts(root, stage):
        for name, *values in pl.read_parquet(part, columns=["candidate_id", *columns]).iter_rows():
            found[name] = tuple(map(str, values))
    return found


def _ids(root: Path, stage: str) -> set[str]:
    return {
        name
        for part in _parts(root, stage)
        for name in pl.read_parquet(part, columns=["task_id"])["task_id"]
    }
