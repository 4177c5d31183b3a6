"""How generators that we know are asked, by their hub id: `known_models.toml` holds what their
cards and papers say, with the source of every value.

Guarantees: an explicit setting is never changed; a model that is not in the table (a local
directory, the demo's small model, any other hub id) is asked with the defaults of `SamplingParams`.
Resolved once, where a configuration is read, so that what is printed, hashed and stored is what is
sent. Does not look at the model itself: a directory that holds a copy of QwQ-32B is an unknown
model, and an endpoint that serves another model under the name Qwen/QwQ-32B is taken at its word.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import MappingProxyType

from kernels_eval.records import Row, SamplingParams
from kernels_eval.tables import table_beside

_TABLE = table_beside(__file__)
KNOWN_MODELS: Mapping[str, Row] = MappingProxyType(
    {name: MappingProxyType(settings) for name, settings in _TABLE.items()}
)
"""Settings by hub id. docs/how-to/sample-with-vllm.md shows the same table, and a test keeps it
so."""


def sampling_for(
    model: str | None, sampling: SamplingParams, explicit: Set[str] | None = None
) -> SamplingParams:
    """`sampling` with what is known of the model in place of defaults. `explicit` names the
    settings that were chosen; None: those that were given when `sampling` was made."""
    chosen = sampling.model_fields_set if explicit is None else explicit
    wanted = (model or "").casefold()  # the hub does not tell upper case from lower either
    known = {name.casefold(): each for name, each in KNOWN_MODELS.items()}.get(wanted, {})
    return sampling.model_copy(
        update={name: value for name, value in known.items() if name not in chosen}
    )
