"""How generators that we know are asked, by their hub id: what their cards and papers say, with the
source of every value.

Guarantees: an explicit setting is never changed; a model that is not in the table (a local
directory, the demo's small model, any other hub id) is asked with the defaults of `SamplingParams`.
Resolved once, where a configuration is read, so that what is printed, hashed and stored is what is
sent. Does not look at the model itself: a directory that holds a copy of QwQ-32B is an unknown
model, and an endpoint that serves another model under the name Qwen/QwQ-32B is taken at its word.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import Any

from kernels_eval.records import SamplingParams

# The card's usage guidelines: temperature 0.6, top-p 0.95 and min-p 0 rather than greedy decoding,
# which repeats itself without end; top-k between 20 and 40, of which we take the end that cuts
# least. Its example generates with 32,768 new tokens. https://huggingface.co/Qwen/QwQ-32B
QWQ_32B: Mapping[str, Any] = MappingProxyType(
    {"temperature": 0.6, "top_p": 0.95, "top_k": 40, "min_p": 0.0, "max_tokens": 32768}
)

# The card states no sampling settings (it points to a blog post). The paper does, in section 3.3:
# temperature 0.9 for training and inference, and responses of at most 16,384 tokens (22K late in
# training, section 4.4). https://arxiv.org/abs/2507.11948 Top-p is stated in neither: 1, which cuts
# nothing. Top-k, min-p and repetition penalty are not stated and not sent.
KEVIN_32B: Mapping[str, Any] = MappingProxyType(
    {"temperature": 0.9, "top_p": 1.0, "max_tokens": 16384}
)

# The card's example draws with temperature 1.0 by default, and states nothing else.
# Top-p, top-k and min-p are therefore those of its base model, QwQ-32B; max_tokens is our default.
# https://huggingface.co/lkongam/KernelCoder
KERNEL_CODER: Mapping[str, Any] = MappingProxyType(
    {**{name: QWQ_32B[name] for name in ("top_p", "top_k", "min_p")}, "temperature": 1.0}
)

KNOWN_MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "cognition-ai/Kevin-32B": KEVIN_32B,
        "Qwen/QwQ-32B": QWQ_32B,
        "lkongam/KernelCoder": KERNEL_CODER,
    }
)
"""Settings by hub id. docs/how-to/sample-with-vllm.md shows the same table, and a test keeps it
so."""

_BY_NAME = {
    name.casefold(): settings for name, settings in KNOWN_MODELS.items()
}  # the hub does not tell upper case from lower either


def sampling_for(
    model: str | None, sampling: SamplingParams, explicit: Set[str] | None = None
) -> SamplingParams:
    """`sampling` with what is known of the model in place of defaults. `explicit` names the
    settings that were chosen; None: those that were given when `sampling` was made."""
    chosen = sampling.model_fields_set if explicit is None else explicit
    known = _BY_NAME.get((model or "").casefold(), {})
    return sampling.model_copy(
        update={name: value for name, value in known.items() if name not in chosen}
    )
