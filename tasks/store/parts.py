"""Columns that a snapshot's parts have, and text that they can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


def present_columns(schema: pa.Schema, columns: Sequence[str]) -> list[str]:
    """Those of the columns that a file has, including struct fields ("timing.speedup")."""
    import pyarrow as pa

    nested = {
        f"{column.name}.{each.name}"
        for column in schema
        if pa.types.is_struct(column.type)
        for each in column.type
    }
    return [name for name in columns if name in schema.names or name in nested]


def storable(value: object) -> object:
    """The value with characters that UTF-8 cannot hold (lone surrogates) replaced."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {key: storable(item) for key, item in value.items()}
    return [storable(item) for item in value] if isinstance(value, list | tuple) else value
