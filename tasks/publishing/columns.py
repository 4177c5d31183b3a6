"""The columns of a published row: what each means, where it comes from, and its type.

Guarantees: the columns of `columns.toml` are in every published file, in that order. What curation
writes beyond them follows, under its own name.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from kernels_eval.records import Row
from kernels_eval.tables import table_beside
from tasks.publishing.config import UNKNOWN
from tasks.tables import CANDIDATES, CURATED, TASKS, VERDICTS

_TABLE: Mapping[str, Mapping[str, str]] = table_beside(__file__)
COLUMNS = {name: entry["meaning"] for name, entry in _TABLE.items()}
ABOVE = {"candidates": CANDIDATES, "verdicts": VERDICTS, "tasks": TASKS}
"""The snapshots that give the other columns, by their name in a `Lineage`."""
ORIGINS: dict[str, dict[str, str]] = {above: {} for above in ABOVE}
"""Per snapshot: its column ("column.field" of a struct) by the name that is published."""
for _name, _entry in _TABLE.items():
    if "origin" in _entry:
        _above, _, _path = _entry["origin"].partition(".")
        ORIGINS[_above][_name] = _path
REQUIRED = {
    **dict.fromkeys(("candidate_id", "task_id", "task_code", "generator"), "text"),
    **dict.fromkeys(("reasoning", "answer", "code", "criterion"), "text"),
    "speedup": "numbers",
}
"""Columns without which a curated snapshot is no training set, and their kinds."""

LICENCES: Mapping[str, str] = {"bundled": "Apache-2.0", "kernelbook": "MIT"}
"""What a source states. KernelBook's is that of the one revision that we load from the hub: a file
may be of any."""


def licence_of(source: str, tasks_config: Row) -> str:
    """SPDX identifier of the licence of a source's tasks, `unknown` where the source states none or
    may be another revision."""
    if source == "kernelbook" and tasks_config.get("location") not in (None, "GPUMODE/KernelBook"):
        return UNKNOWN
    return LICENCES.get(source, UNKNOWN) if source == tasks_config.get("source") else UNKNOWN


def provenance() -> dict[str, pa.DataType]:
    """Types of the columns that do not come from the curated snapshot itself."""
    found = {"task_license": pa.string()}
    for above, schema in ABOVE.items():
        for name, path in ORIGINS[above].items():
            column, _, field = path.partition(".")
            kind = schema.field(column).type
            found[name] = kind.field(field).type if field else kind
    return found


def published_schema(curated: pa.Schema) -> pa.Schema:
    """The schema of a published file, for what a curated snapshot holds."""
    known = {field.name: field.type for schema in (CURATED, curated) for field in schema}
    known |= provenance()
    extra = [name for name in curated.names if name not in COLUMNS]
    return pa.schema([(name, _plain(known[name])) for name in (*COLUMNS, *extra)])


def _plain(of: pa.DataType) -> pa.DataType:
    """One type for a text and one for a list, whichever library wrote the snapshot."""
    if pa.types.is_large_string(of) or pa.types.is_string_view(of):
        return pa.string()
    if pa.types.is_list(of) or pa.types.is_large_list(of):
        return pa.list_(_plain(of.value_type))
    if pa.types.is_struct(of):
        return pa.struct([(field.name, _plain(field.type)) for field in of])
    return of
