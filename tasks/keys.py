"""Settings that identify a stage's result: all but those marked `UNKEYED`, which cannot change it
(`jobs: Annotated[PositiveInt, UNKEYED] = 8`)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from pydantic import BaseModel, Field

from kernels_eval.records import Json

UNKEYED = "unkeyed"
"""Mark of a field, as metadata of its annotation."""
Asked = Annotated[bool, Field(exclude_if=lambda asked: not asked)]
"""A switch that a configuration, and so a fingerprint, has only while it is on."""
LeastShare = Annotated[float | None, Field(ge=0, le=1, exclude_if=lambda least: least is None)]
"""A least share of the time, which a configuration has only while it is set."""


def keyed(config: BaseModel, *, without: Collection[str] = ()) -> Json:
    """The identifying settings as JSON; `without` names others that are not used."""
    fields = type(config).model_fields.items()
    unkeyed = {name for name, field in fields if UNKEYED in field.metadata}
    return config.model_dump(mode="json", exclude=unkeyed | set(without))
