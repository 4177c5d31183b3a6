"""Published columns: meaning, origin and type.

Guarantees: files have the columns of `columns.toml`, in order, then curation's others by their own
names.
"""

from __future__ import annotations

from collections.abc import Mapping

from kernels_eval.records import Row
from kernels_eval.tables import table_beside
from tasks.publishing.config import UNKNOWN

_TABLE: Mapping[str, Mapping[str, str]] = table_beside(__file__)
COLUMNS = {name: entry["meaning"] for name, entry in _TABLE.items()}
ORIGINS: dict[str, dict[str, str]] = {"candidates": {}, "verdicts": {}, "tasks": {}}
"""Per snapshot: its column ("column.field" of a struct) by the name that is published."""
for _name, _entry in _TABLE.items():
    if "origin" in _entry:
        _above, _, _path = _entry["origin"].partition(".")
        ORIGINS[_above][_name] = _path
REQUIRED = (
    *("candidate_id", "task_id", "task_code", "generator"),
    *("reasoning", "answer", "code", "criterion", "speedup"),
)
"""Columns without which a curated snapshot is no training set."""

LICENCES: Mapping[str, str] = {"bundled": "Apache-2.0", "kernelbook": "MIT"}
"""What a source states. KernelBook's is that of the one revision that we load from the hub: a file
may be of any."""


def licence_of(source: str, tasks_config: Row) -> str:
    """A source's SPDX licence, `unknown` where none is stated or the revision may differ."""
    if source == "kernelbook" and tasks_config.get("location") not in (None, "GPUMODE/KernelBook"):
        return UNKNOWN
    return LICENCES.get(source, UNKNOWN) if source == tasks_config.get("source") else UNKNOWN
