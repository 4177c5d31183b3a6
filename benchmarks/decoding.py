"""How fast a vLLM replica writes: the memory bound of decoding, fitted to measurements."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from pydantic import PositiveFloat

from tasks.synthesis import sizing

STEP_S, SEQUENCE_S = 1.5e-3, 0.045e-3
"""Time of a step beyond moving bytes, and per sequence in it: measured, see `decoding`."""
READING_SHARE, FP8_READING = 0.7, 2.2e12
"""Speed at which attention reads keys and values: share of the bandwidth; at most these bytes per
second and GPU for an FP8 cache, which is converted."""


class Card(sizing.Gpu):
    """A GPU, and what it moves at most."""

    bytes_per_s: PositiveFloat


H200 = Card(**sizing.H200.model_dump(), bytes_per_s=4.8e12)


class Decoding(NamedTuple):
    """How a replica on `gpus` GPUs writes. `sequences` at once is 0 where not one fits; the speed
    is then that of one."""

    sequences: int
    tokens_per_s: float
    gpus: int

    def gpu_s(self, tokens: float) -> float:
        """GPU-seconds to write so many tokens."""
        return tokens / self.tokens_per_s * self.gpus


def decoding(
    shape: sizing.Shape,
    card: Card,
    gpus: int,
    utilization: float,
    prompt: float,
    answer: float,
    most: int = sizing.MOST_SEQS,
) -> Decoding:
    """How a replica writes answers of `answer` tokens to prompts of `prompt` tokens.

    context = prompt + answer / 2
    n = memory for keys and values / (bytes per token * context)
    step = weights / bandwidth + n * context * bytes per token / reading + STEP_S + n * SEQUENCE_S
    tokens/s = n / step

    Bytes over bandwidth are the memory bound (Pope et al., arXiv 2211.05102, section 2.1);
    `reading` is attention's part of it (READING_SHARE, FP8_READING). Constants are fitted to
    fourteen measurements of QwQ-32B's shape (2026-11-23-decoding-h200.md: eager;
    2026-11-26-protocol-14-and-h200.md, 2026-11-26-refresh-on-gpus.md and
    2026-11-26-client-fp8-and-two-h200.md: CUDA graphs, H200 and H100, one and two GPUs; 256 answers
    of 384 tokens). Thirteen are within 7.5 %; 4 sequences on an H100 wrote 0.90 times as much.
    Other model sizes are unmeasured. Prefill (1 to 4 %) is not counted."""
    context = prompt + answer / 2
    memory = sizing.kv_cache_bytes(shape, card.memory_bytes, gpus, utilization) or 0
    fit = min(most, sizing.fitting(shape, memory, context))
    held = max(1, fit)
    reading = min(READING_SHARE * card.bytes_per_s, FP8_READING if shape.value_bytes == 1 else inf)
    held_bytes = held * context * shape.token_bytes
    step_s = (shape.weight_bytes / card.bytes_per_s + held_bytes / reading) / gpus
    step_s += STEP_S + held * SEQUENCE_S
    return Decoding(fit, held / step_s, gpus)
