"""Parquet schemas of the snapshots, with nested values as structs.

`tables.toml` lists the columns, docs/hooks/columns.py describes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl
import pyarrow as pa

from kernels_eval.errors import UsageError, cause_of
from kernels_eval.records import Reason, Status
from kernels_eval.tables import table_beside

_COLUMNS: dict[str, dict[str, str]] = table_beside(__file__)

CORRECT, TASK_ERROR = (
    pl.col("status") == status.value for status in (Status.CORRECT, Status.TASK_ERROR)
)
"""Conditions on verdict rows."""
RIGHT_BY_TORCH = (pl.col("reason") == Reason.NO_CUSTOM_KERNEL.value) & pl.col("outputs_match")
"""Right outputs without a custom kernel: a rejected verdict that counts on the track `any`."""


def right(frame: pl.DataFrame) -> pl.Expr:
    """Condition on verdict rows: right outputs, whoever computed them (`Verdict.correct_any`), as
    far as the columns say it."""
    known = {"reason", "outputs_match"} <= set(frame.columns)
    return (CORRECT | RIGHT_BY_TORCH if known else CORRECT).fill_null(False)


def unconfirmed(frame: pl.DataFrame) -> pl.Expr:
    """Condition on verdict rows: `right`, at level `screen`. Of none where no column says it."""
    if frame.schema.get("level") != pl.String:  # a foreign table's may be a task's
        return pl.lit(False)
    return right(frame) & (pl.col("level") == "screen").fill_null(False)


def _fields(table: str) -> list[tuple[str, pa.DataType]]:
    return [(name, _type(kind)) for name, kind in _COLUMNS[table].items()]


def _type(kind: str) -> pa.DataType:
    if kind.endswith("[]"):
        return pa.list_(_type(kind.removesuffix("[]")))
    return pa.struct(_fields(kind)) if kind in _COLUMNS else pa.type_for_alias(kind)


def columns_of(schema: pa.Schema) -> pl.Schema:
    return pl.Schema(schema)  # of a table, polars would ask pyarrow, which imports pandas


def completed(
    frame: pl.DataFrame,
    columns: Mapping[str, pl.DataType],
    needed: Sequence[str] = (),
    *,
    what: str = "this",
    fix: str = "give tables as their stages wrote them",
) -> pl.DataFrame:
    """The frame with all of `columns`: absent ones are null, and structs get their absent fields.

    Raises UsageError, about `what` needs it, for a `needed` column that is absent, and for one of
    another kind (text, numbers, lists, structs).
    """
    if missing := [name for name in needed if name not in frame.columns]:
        raise UsageError(f"{what} needs the columns {', '.join(missing)}", fix)
    changed, schema = [], frame.schema  # polars makes it anew each time
    for name, kind in columns.items():
        found = schema.get(name, pl.Null())
        if found == pl.Null:
            changed.append(pl.lit(None, kind).alias(name))
        elif kind_of(found) != kind_of(kind):
            raise UsageError(f"the column {name} holds {found}, not {kind}", fix)
        elif isinstance(kind, pl.Struct) and isinstance(found, pl.Struct):
            changed.append(pl.col(name).cast(pl.Struct({**found.to_schema(), **kind.to_schema()})))
    try:
        return frame.with_columns(changed)
    except pl.exceptions.PolarsError as error:
        raise UsageError(f"a column is not as {what} reads it: {cause_of(error)}", fix) from error


def kind_of(column: pl.DataType) -> str:
    """What a column holds, whatever its width: numbers, text, or the name of its type."""
    if column.is_numeric():
        return "numbers"
    return "text" if column in (pl.String, pl.Categorical, pl.Enum) else str(column.base_type())


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
