"""Sampling settings of known generators by hub id; `known_models.toml` has the sources. Explicit
settings are kept; unknown models get `SamplingParams`' defaults."""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import MappingProxyType

from kernels_eval.records import Row, SamplingParams
from kernels_eval.tables import table_beside

_TABLE = table_beside(__file__)
KNOWN_MODELS: Mapping[str, Row] = MappingProxyType(
    {name: MappingProxyType(settings) for name, settings in _TABLE.items()}
)
"""Settings by hub id."""


def sampling_for(
    model: str | None, sampling: SamplingParams, explicit: Set[str] | None = None
) -> SamplingParams:
    """`sampling` with a known model's settings in place of defaults. `explicit` names chosen
    settings; None: those given when `sampling` was made."""
    chosen = sampling.model_fields_set if explicit is None else explicit
    wanted = (model or "").casefold()  # the hub does not tell upper case from lower either
    known = {name.casefold(): each for name, each in KNOWN_MODELS.items()}.get(wanted, {})
    return sampling.model_copy(
        update={name: value for name, value in known.items() if name not in chosen}
    )
