"""Settings that identify a stage's result: all but those marked `UNKEYED`, which cannot change it
(`jobs: Annotated[PositiveInt, UNKEYED] = 8`)."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import BaseModel

from kernels_eval.records import Json

UNKEYED = "unkeyed"
"""Mark of a field, as metadata of its annotation."""


def keyed(config: BaseModel, *, without: Collection[str] = ()) -> Json:
    """The identifying settings as JSON; `without` names others that are not used."""
    fields = type(config).model_fields.items()
    unkeyed = {name for name, field in fields if UNKEYED in field.metadata}
    return config.model_dump(mode="json", exclude=unkeyed | set(without))
