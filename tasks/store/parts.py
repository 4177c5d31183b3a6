"""Columns that a snapshot's parts have, and text that they can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kernels_eval.errors import UsageError

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

ANOTHER_ROOT = "its parts were not written by one program: run its stage again under another root"


def present_columns(schema: pa.Schema, columns: Sequence[str]) -> list[str]:
    """Those of the columns that a file has, including struct fields ("timing.speedup"). Raises
    UsageError for a field of a column that is no struct."""
    import pyarrow as pa

    for column in {name.partition(".")[0] for name in columns if "." in name} & set(schema.names):
        kind = schema.field(column).type
        if not pa.types.is_struct(kind) and not pa.types.is_null(kind):
            raise UsageError(
                f"the column {column} is {kind}, not a struct",
                "give the tables that verification and synthesis wrote",
            )
    nested = {
        f"{column.name}.{each.name}"
        for column in schema
        if pa.types.is_struct(column.type)
        for each in column.type
    }
    return [name for name in columns if name in schema.names or name in nested]


def combine_parts(tables: Sequence[pl.DataFrame], where: str) -> pl.DataFrame:
    """The rows of all parts; missing columns and struct fields are null. Raises UsageError for a
    column of two kinds, such as text and numbers, which a relaxed concatenation would make text."""
    import polars as pl

    from tasks.tables import kind_of

    first: dict[str, pl.DataType] = {}
    for table in tables:
        for name, found in table.schema.items():
            if found == pl.Null:
                continue
            expected = first.setdefault(name, found)
            if kind_of(found) != kind_of(expected):
                raise UsageError(
                    f"the column {name} is {expected} in one part of {where} and {found} in"
                    " another",
                    ANOTHER_ROOT,
                )
    try:
        return pl.concat(tables, how="diagonal_relaxed") if tables else pl.DataFrame()
    except pl.exceptions.PolarsError as error:
        problem = f"the parts of {where} do not fit together: {str(error).splitlines()[0]}"
        raise UsageError(problem, ANOTHER_ROOT) from error


def storable(value: object) -> object:
    """The value with characters that UTF-8 cannot hold (lone surrogates) replaced."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {key: storable(item) for key, item in value.items()}
    return [storable(item) for item in value] if isinstance(value, list | tuple) else value
