"""How long and how many the sequences of a vLLM server are: pure arithmetic over a model's
config.json and the memory it has.

The formulas: a token of context takes `2 * layers * kv_heads * head_dim * 2` bytes (keys and
values, 16 bits each). A server's memory for them is what its GPUs give it, less the weights and 2
GiB a GPU for activations. A response being written holds on average its prompt and half of its
length, and reasoning models write about half of what they may (7,000 of 16,384 tokens in the
paper's set): so as many are written at once as fit with a quarter of `max_tokens` each. Where they
run longer vLLM preempts some and resumes them later. Does not know of quantised weights or
caches, of layers with a sliding window, or of latent attention: these need less, and `max_num_seqs`
can be given.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import Field

from kernels_eval.records import Record

MOST_SEQS = 256
"""vLLM's own default on most GPUs; an H200 wrote 5,100 tokens/s with it for a 32B model."""
BYTES_A_TOKEN = 2.0
"""Of code and English, for a tokenizer of today: 3 to 4. Fewer is safe."""
TEMPLATE_TOKENS = 256
"""What a chat template adds."""
ROUND_TO = 256
ACTIVATIONS_BYTES = 2 << 30
VALUE_BYTES = 2
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for --max-lora-rank."""


class Shape(Record):
    """Of a model: what its memory depends on."""

    layers: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    window: int | None = Field(default=None, ge=1)
    weight_bytes: int = Field(default=0, ge=0)

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * VALUE_BYTES


def read_shape(model: str) -> Shape | None:
    """The shape of a model directory, or of a hub id that this machine's hub cache holds; None
    where its config.json says too little."""
    directory = model_directory(model)
    if directory is None:
        return None
    try:
        config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config") or config
        heads = config["num_attention_heads"]
        return Shape(
            layers=config["num_hidden_layers"],
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            window=config.get("max_position_embeddings"),
            weight_bytes=sum(path.stat().st_size for path in directory.glob("*.safetensors")),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def prompt_tokens(prompts: Iterable[str]) -> int:
    """An upper estimate of the tokens of the longest prompt in its template."""
    return (
        int(
            max((len(prompt.encode("utf-8", "replace")) for prompt in prompts), default=0)
            / BYTES_A_TOKEN
        )
        + TEMPLATE_TOKENS
    )


def model_len(prompt: int, max_tokens: int, window: int | None) -> int:
    """--max-model-len: room for the longest prompt and a whole response (tokens), within the
    model's window."""
    wanted = -(-(prompt + max_tokens) // ROUND_TO) * ROUND_TO
    return min(wanted, window) if window else wanted


def num_seqs(shape: Shape | None, memory_bytes: int | None, prompt: int, max_tokens: int) -> int:
    """--max-num-seqs, 1 to 256: how many responses fit into the memory for keys and values; 256
    where that is not known."""
    if shape is None or memory_bytes is None:
        return MOST_SEQS
    fit = max(0, memory_bytes) // (shape.token_bytes * max(1, prompt + max_tokens // 4))
    return int(min(MOST_SEQS, max(1, fit)))


def kv_cache_bytes(
    shape: Shape | None, gpu_bytes: int | None, gpus: int, utilization: float
) -> int | None:
    """Memory for keys and values of a replica on `gpus` GPUs of `gpu_bytes` each; None where it is
    not known."""
    if shape is None or gpu_bytes is None:
        return None
    return int(gpus * (gpu_bytes * utilization - ACTIVATIONS_BYTES)) - shape.weight_bytes


def lora_rank(adapters: Iterable[str]) -> int:
    """--max-lora-rank for these adapter directories: the smallest that vLLM takes and all fit
    into."""
    ranks = [LORA_RANKS[0]]
    for adapter in adapters:
        try:
            ranks.append(
                int(
                    json.loads((Path(adapter) / "adapter_config.json").read_text(encoding="utf-8"))[
                        "r"
                    ]
                )
            )
        except (OSError, ValueError, KeyError, TypeError):
            continue  # vLLM says what is wrong with it
    return next((rank for rank in LORA_RANKS if rank >= max(ranks)), LORA_RANKS[-1])


def model_directory(model: str) -> Path | None:
    """Where a model's files lie: its directory, or this machine's hub cache for a hub id. Asks no
    network; None where it is in neither."""
    if Path(model).expanduser().is_dir():
        return Path(model).expanduser()
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
