"""Parquet schemas of the snapshots, with nested values as structs.

`tables.toml` lists the columns, docs/hooks/columns.py describes them.
"""

from __future__ import annotations

import polars as pl
import pyarrow as pa

from kernels_eval.records import Status
from kernels_eval.tables import table_beside

_COLUMNS: dict[str, dict[str, str]] = table_beside(__file__)

CORRECT, TASK_ERROR = (
    pl.col("status") == status.value for status in (Status.CORRECT, Status.TASK_ERROR)
)
"""Conditions on verdict rows."""


def _fields(table: str) -> list[tuple[str, pa.DataType]]:
    return [(name, _type(kind)) for name, kind in _COLUMNS[table].items()]


def _type(kind: str) -> pa.DataType:
    if kind.endswith("[]"):
        return pa.list_(_type(kind.removesuffix("[]")))
    return pa.struct(_fields(kind)) if kind in _COLUMNS else pa.type_for_alias(kind)


SAMPLING, TIMING = _type("sampling"), _type("timing")
TASKS, CANDIDATES, VERDICTS, CURATED, DECISIONS = (
    pa.schema(_fields(table))
    for table in ("tasks", "candidates", "verdicts", "curated", "decisions")
)
WORKLOADS, PROFILES, KERNEL_PROFILES, TRACE_FLAGS = (
    pa.schema(_fields(table))
    for table in ("workloads", "profiles", "kernel_profiles", "trace_flags")
)
SEARCHED, NUMBERS, SCORES, VIEWED = (
    pa.schema(_fields(table)) for table in ("search", "numbers", "scores", "view")
)
