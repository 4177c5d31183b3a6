"""The sizes of a server against models whose numbers are public, and the edges where something is
not known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.sources.small_model import build_small_model
from tasks.synthesis.sizing import (
    MOST_SEQS,
    ROUND_TO,
    TEMPLATE_TOKENS,
    Shape,
    kv_cache_bytes,
    lora_rank,
    model_len,
    num_seqs,
    prompt_tokens,
    read_shape,
)

QWQ = {
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "hidden_size": 5120,
    "max_position_embeddings": 40960,
}
GIB = 1 << 30


def model(directory: Path, config: dict, weights_bytes: int = 0) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(b"0" * weights_bytes)
    return str(directory)


def test_a_token_of_qwq_takes_a_quarter_of_a_mebibyte(tmp_path):
    shape = read_shape(model(tmp_path / "m", QWQ, 100))
    assert shape == Shape(layers=64, kv_heads=8, head_dim=128, window=40960, weight_bytes=100)
    assert shape.token_bytes == 256 << 10


def test_what_config_json_says_comes_first(tmp_path):
    assert (
        read_shape(model(tmp_path / "nested", {"model_type": "vlm", "text_config": QWQ})).layers
        == 64
    )
    assert read_shape(model(tmp_path / "heads", {**QWQ, "head_dim": 64})).head_dim == 64
    without = {
        key: value
        for key, value in QWQ.items()
        if key not in ("num_key_value_heads", "max_position_embeddings")
    }
    assert (
        shape := read_shape(model(tmp_path / "old", without))
    ).kv_heads == 40 and shape.window is None
    assert read_shape(model(tmp_path / "other", {"model_type": "mamba"})) is None
    assert read_shape("org/that-no-cache-holds") is None
    assert read_shape("not a hub id, and no directory") is None


def test_the_small_model_has_a_shape(tmp_path):
    shape = read_shape(str(build_small_model(tmp_path / "small", ["some text"])))
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.window) == (
        2,
        2,
        32,
        32768,
    ) and shape.weight_bytes > 100_000


def test_there_is_room_for_the_longest_prompt_and_a_whole_answer():
    prompt = prompt_tokens(["short", "é" * 1000, "y" * 1000])
    assert prompt == 1000 + TEMPLATE_TOKENS, "by bytes: two a token at least"
    assert prompt_tokens([]) == TEMPLATE_TOKENS
    assert (
        model_len(prompt, 16384, None) % ROUND_TO == 0
        and 0 <= model_len(prompt, 16384, None) - prompt - 16384 < ROUND_TO
    )
    assert model_len(prompt, 16384, 8192) == 8192


def test_a_32b_model_fits_onto_one_h200_and_two_h100():
    shape = Shape(layers=64, kv_heads=8, head_dim=128, window=40960, weight_bytes=65_500_000_000)
    one = num_seqs(shape, kv_cache_bytes(shape, 141 * 10**9, 1, 0.9), 1500, 16384)
    two = num_seqs(shape, kv_cache_bytes(shape, 80 * 10**9, 2, 0.9), 1500, 16384)
    assert 35 <= one <= 45 and 45 <= two <= 55
    assert num_seqs(shape, kv_cache_bytes(shape, 8 * 141 * 10**9, 1, 0.9), 500, 1000) == MOST_SEQS
    assert num_seqs(shape, kv_cache_bytes(shape, 72 * 10**9, 1, 0.9), 1500, 16384) == 1, (
        "vLLM itself says that it does not fit"
    )


def test_what_is_not_known_is_left_to_the_most():
    shape = Shape(layers=2, kv_heads=2, head_dim=32)
    assert num_seqs(None, GIB, 100, 100) == num_seqs(shape, None, 100, 100) == MOST_SEQS
    assert kv_cache_bytes(None, GIB, 1, 0.9) is None and kv_cache_bytes(shape, None, 1, 0.9) is None


@pytest.mark.parametrize(
    ("ranks", "most"), [([], 8), ([4], 8), ([8, 32], 32), ([33], 64), ([1000], 512), ([None], 8)]
)
def test_the_rank_that_all_adapters_fit_into(tmp_path, ranks, most):
    adapters = []
    for number, rank in enumerate(ranks):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "adapter_config.json").write_text(json.dumps({"r": rank}))
        adapters.append(str(tmp_path / str(number)))
    assert lora_rank(adapters) == most
