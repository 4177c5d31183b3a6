"""Which settings identify what a stage makes: all but those marked as `UNKEYED`.

A setting is left out of fingerprints where it cannot change a result, such as how many programs are
measured at once: `jobs: Annotated[PositiveInt, UNKEYED] = 8`.
"""

from __future__ import annotations

from collections.abc import Collection

from pydantic import BaseModel

from kernels_eval.records import Json

UNKEYED = "unkeyed"
"""The mark of a field, as metadata of its annotation."""


def keyed(config: BaseModel, *, without: Collection[str] = ()) -> Json:
    """The settings of a configuration that identify what is made with it, as JSON; `without` names
    further ones that are not used."""
    fields = type(config).model_fields.items()
    unkeyed = {name for name, field in fields if UNKEYED in field.metadata}
    return config.model_dump(mode="json", exclude=unkeyed | set(without))
