"""The one place where columns of tables that others wrote get the types that the software wants.

What another type holds without loss is read (dictionaries, decimals, numbers as ids, arrays);
everything else is one UsageError that names the place, the column, its type and the wanted one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any, NoReturn

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.records import Json, Row
from tasks.tables import CANDIDATES, CURATED, TASKS, TRACE_FLAGS, VERDICTS, columns_of

_COLUMNS: dict[str, pl.DataType] = {
    **{
        name: kind
        for schema in (TASKS, CURATED, TRACE_FLAGS, CANDIDATES, VERDICTS)
        for name, kind in columns_of(schema).items()
    },
    **dict.fromkeys(("model", "python_code", "given_id"), pl.String()),
    **dict.fromkeys(("max_tokens", "sample_id", "row"), pl.Int64()),
}
ANY = ("level", "problem_id", "uuid")
"""Columns that may be numbers or text: a task's level, and that of a verdict."""
COLUMNS = {name: kind for name, kind in _COLUMNS.items() if name not in ANY}
"""Types by the name of a column, the same in every table that others write."""
FIX = "give the column as verification and synthesis write it (docs/reference/tables.md)"
_NOT_PLAIN = (bytes, list, tuple, dict, set, date, time, timedelta)


def typed(
    frame: pl.DataFrame, where: object, kinds: Mapping[str, pl.DataType] = COLUMNS
) -> pl.DataFrame:
    """The frame with its columns of these names in a type of the wanted kind. Raises UsageError."""
    changed = []
    for name in kinds.keys() & set(frame.columns):
        read = _read(pl.col(name), name, frame.schema[name], kinds[name], where)
        changed += [] if read is None else [read.alias(name)]
    try:
        return frame.with_columns(changed)
    except pl.exceptions.PolarsError as error:
        raise UsageError(f"{where}: {str(error).splitlines()[0]}", FIX) from error


def typed_row(row: Row, where: object) -> Json:
    """The row with its values of these names, numbers also from text; NaN is null. Raises
    UsageError."""
    return {name: _value(value, name, COLUMNS.get(name), where) for name, value in row.items()}


def _read(
    column: pl.Expr, name: str, found: pl.DataType, wanted: pl.DataType, where: object
) -> pl.Expr | None:
    if found == wanted:
        return None
    if found == pl.Null:
        return column.cast(wanted)
    if wanted == pl.String and (
        found in (pl.Categorical, pl.Enum) or (found.is_integer() and name.endswith("_id"))
    ):
        return column.cast(pl.String)
    if wanted.is_numeric() and found.is_numeric():
        number = column.cast(pl.Float64) if found.is_decimal() else column
        if wanted.is_integer() and not found.is_integer():  # so others write a missing one
            return pl.when(number.is_finite()).then(number)
        return number if found.is_decimal() else None
    if isinstance(wanted, pl.List) and isinstance(found, pl.List | pl.Array):
        return _read_list(column, name, found, wanted, where)
    if isinstance(wanted, pl.Struct) and isinstance(found, pl.Struct):
        return _read_struct(column, name, found, wanted, where)
    _refuse(where, name, found, wanted)


def _read_list(
    column: pl.Expr, name: str, found: pl.List | pl.Array, wanted: pl.List, where: object
) -> pl.Expr | None:
    kinds = [pl.Series(dtype=each).explode().dtype for each in (found, wanted)]
    element = _read(pl.element(), f"{name}[]", kinds[0], kinds[1], where)
    if isinstance(found, pl.Array):
        column = column.arr.to_list()
    elif element is None:
        return None
    return column if element is None else column.list.eval(element)


def _read_struct(
    column: pl.Expr, name: str, found: pl.Struct, wanted: pl.Struct, where: object
) -> pl.Expr | None:
    fields, changed, kinds = [], False, pl.Schema(wanted.to_schema())
    for inner, kind in pl.Schema(found.to_schema()).items():
        field = column.struct.field(inner)
        read = _read(field, f"{name}.{inner}", kind, kinds.get(inner, kind), where)
        changed = changed or read is not None
        fields.append((field if read is None else read).alias(inner))
    return pl.when(column.is_not_null()).then(pl.struct(fields)) if changed else None


def _value(value: Any, name: str, wanted: pl.DataType | None, where: object) -> object:
    if isinstance(value, str) and wanted is not None and wanted.is_numeric():
        value = _number(value)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, Decimal):
        value = float(value)
    huge = isinstance(value, int) and abs(value) >= 2**63
    number = isinstance(value, int | float) and not isinstance(value, bool) and not huge
    if name in ANY or wanted is None:
        right = name not in ANY or not (huge or isinstance(value, _NOT_PLAIN))
    elif wanted == pl.String:
        if isinstance(value, int) and number and name.endswith("_id"):
            return str(value)
        right = isinstance(value, str)
    elif wanted.is_numeric():
        right = number
    elif isinstance(wanted, pl.Struct):
        right = isinstance(value, dict)
    elif isinstance(wanted, pl.List):
        right = isinstance(value, list)
    else:
        right = isinstance(value, bool)
    if not right:
        _refuse(where, name, type(value).__name__, wanted or "a number or text")
    return value


def _number(text: str) -> object:
    """The number that a text is, else the text."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _refuse(where: object, name: str, found: object, wanted: object) -> NoReturn:
    raise UsageError(f"{where}: the column {name} holds {found}, not {wanted}", FIX)
