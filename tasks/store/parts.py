"""Columns of a snapshot's parts that several versions wrote, and how they combine."""

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
    UsageError for a field of a non-empty column that is no struct."""
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
    """The rows of all parts. Missing columns and struct fields are null; numeric types may differ.
    Raises UsageError for a column of two kinds, such as text and numbers."""
    import polars as pl

    seen: dict[str, pl.DataType] = {}
    for table in tables:
        for name, kind in table.schema.items():
            if _kind_of(seen.setdefault(name, kind)) is None:
                seen[name] = kind
            if _kind_of(kind) not in (None, _kind_of(seen[name])):
                raise UsageError(
                    f"the column {name} is {seen[name]} in one part of {where} and {kind} in"
                    " another",
                    ANOTHER_ROOT,
                )
    try:
        return pl.concat(tables, how="diagonal_relaxed") if tables else pl.DataFrame()
    except pl.exceptions.PolarsError as error:
        problem = f"the parts of {where} do not fit together: {str(error).splitlines()[0]}"
        raise UsageError(problem, ANOTHER_ROOT) from error


def _kind_of(of: pl.DataType) -> str | None:
    import polars as pl

    if of == pl.Null:
        return None
    if of.is_numeric():
        return "numbers"
    if isinstance(of, pl.String | pl.Categorical | pl.Enum):
        return "text"
    return str(of.base_type())


def storable(value: object) -> object:
    """The value with characters that UTF-8 cannot hold (lone surrogates) replaced."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {key: storable(item) for key, item in value.items()}
    return [storable(item) for item in value] if isinstance(value, list | tuple) else value
