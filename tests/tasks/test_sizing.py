"""The sizes of a server against models whose numbers are public, and the edges where something is
not known."""

import json
import sys
from types import SimpleNamespace

import pytest

from tasks.sources.small_model import build_small_model
from tasks.synthesis.config import ServerConfig
from tasks.synthesis.sizing import (
    H200,
    MOST_SEQS,
    QWQ_32B,
    ROUND_TO,
    TEMPLATE_TOKENS,
    Gpu,
    Shape,
    gpus_a_replica,
    kv_cache_bytes,
    lora_rank,
    model_len,
    num_seqs,
    prompt_tokens,
    read_gpu,
    read_shape,
    size_of,
)

QWQ = {
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "hidden_size": 5120,
    "max_position_embeddings": 40960,
}
GIB = 1 << 30


def model(directory, config, weights_bytes=0):
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
    assert read_shape(model(tmp_path / "none", QWQ | {"num_attention_heads": 0})) is None
    assert read_shape(model(tmp_path / "list", [QWQ])) is None
    assert read_shape("org/that-no-cache-holds") is None
    assert read_shape("not a hub id, and no directory") is None


def test_weights_count_as_they_are_served(tmp_path):
    """Once where a repository has them in two forms; in 16 bits; FP8 ones no second time."""
    twice = model(tmp_path / "twice", QWQ, 100)
    (tmp_path / "twice" / "consolidated.safetensors").write_bytes(b"0" * 100)
    (tmp_path / "twice" / "pytorch_model.bin").write_bytes(b"0" * 70)
    assert read_shape(twice).weight_bytes == 100
    (tmp_path / "twice" / "model.safetensors").unlink()
    (tmp_path / "twice" / "consolidated.safetensors").unlink()
    assert read_shape(twice).weight_bytes == 70
    assert read_shape(model(tmp_path / "wide", QWQ | {"dtype": "float32"}, 200)).weight_bytes == 100
    fp8 = read_shape(model(tmp_path / "fp8", QWQ | {"quantization_config": {}}, 50))
    assert fp8.served(FP8).weight_bytes == 50


def test_each_gpu_of_a_replica_holds_a_head(tmp_path):
    """vLLM copies them where there are fewer heads than GPUs."""
    one = read_shape(model(tmp_path / "one", QWQ | {"num_key_value_heads": 1}, 100))
    assert [one.served((), gpus).token_bytes for gpus in (1, 2, 4)] == [32768, 65536, 131072]
    assert QWQ_32B.served((), 8) == QWQ_32B


def test_the_small_model_has_a_shape(tmp_path):
    shape = read_shape(str(build_small_model(tmp_path / "small", ["some text"])))
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.window) == (
        2,
        2,
        32,
        32768,
    ) and shape.weight_bytes > 100_000


def test_there_is_room_for_the_longest_prompt_and_a_whole_answer():
    prompt, _ = prompt_tokens([*map(size_of, ["short", "é" * 1000, "y" * 1000])])
    assert prompt == 1000 + TEMPLATE_TOKENS, "by bytes: two a token at least"
    assert prompt_tokens([]) == (TEMPLATE_TOKENS, TEMPLATE_TOKENS)
    assert (
        model_len(prompt, 16384, None) % ROUND_TO == 0
        and 0 <= model_len(prompt, 16384, None) - prompt - 16384 < ROUND_TO
    )
    assert model_len(prompt, 16384, 8192) == 8192


def test_one_long_prompt_takes_no_slot_from_the_others():
    short, long = [3500] * 999, 350_000
    assert prompt_tokens(short)[1] == 1000 + TEMPLATE_TOKENS
    assert prompt_tokens([*short, long])[1] == 1099 + TEMPLATE_TOKENS


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


@pytest.mark.parametrize("rank, most", [(4, 8), (8, 8), (32, 32), (33, 64), (1000, 512), (None, 8)])
def test_the_rank_that_an_adapter_fits_into(tmp_path, rank, most):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": rank}))
    assert lora_rank(tmp_path) == most


# -- replicas --------------------------------------------------------------------------------------

H100 = Gpu(name="NVIDIA H100 80GB", memory_bytes=81_559 << 20)
CARD_24 = Gpu(name="card", memory_bytes=23 << 30)
CARD_8 = Gpu(name="card", memory_bytes=8 << 30)
FP8 = ("--quantization", "fp8")
FP8_CACHE = (*FP8, "--kv-cache-dtype=fp8")
SMALL_MODEL = Shape(layers=28, kv_heads=2, head_dim=128, window=32768, weight_bytes=3 * 10**9)


@pytest.mark.parametrize("args, room", [((), 268_528), (FP8, 381_552), (FP8_CACHE, 763_120)])
def test_the_room_for_keys_and_values_is_what_vllm_reported(args, room):
    shape = QWQ_32B.served(args)
    memory = kv_cache_bytes(shape, H200.memory_bytes, 1, 0.93)
    assert memory / shape.token_bytes == pytest.approx(room, rel=0.035)


@pytest.mark.parametrize(
    "shape, gpu, server, machine, gpus",
    [
        (QWQ_32B, H200, {}, 8, 2),  # measured: 24 % more a GPU than with one
        (QWQ_32B, H200, {"args": FP8_CACHE}, 8, 1),  # 9 % more with two
        (QWQ_32B, H100, {}, 8, 2),
        (QWQ_32B, H100, {"args": FP8_CACHE}, 8, 2),  # 12 % more with two
        (QWQ_32B, CARD_24, {}, 4, 4),
        (QWQ_32B, H200, {}, 1, 1),
        (QWQ_32B, H200, {}, 3, 1),  # one of three GPUs would stay idle
        (QWQ_32B, H200, {"replicas": 4}, 4, 1),
        (QWQ_32B, H200, {"replicas": 1}, 4, 2),
        (QWQ_32B, H200, {"replicas": 9}, 4, 1),
        (QWQ_32B, H200, {"tensor_parallel": 4}, 8, 4),
        (QWQ_32B.model_copy(update={"kv_heads": 1}), H100, {}, 8, 1),
        (QWQ_32B, CARD_8, {}, 8, 1),
        (SMALL_MODEL, H200, {}, 8, 1),
        (SMALL_MODEL.model_copy(update={"weight_bytes": 0}), H200, {}, 8, 1),
        (None, H200, {}, 8, 1),
        (QWQ_32B, None, {}, 8, 1),
        (QWQ_32B, H200, {}, 0, 1),
    ],
)
def test_a_replica_has_the_fewest_gpus_that_hold_enough_answers(shape, gpu, server, machine, gpus):
    config = ServerConfig.model_validate(server)
    assert gpus_a_replica(shape, gpu, config, machine, 1300, 8192) == gpus


def test_arguments_of_the_server_change_what_it_holds():
    assert QWQ_32B.served(("--kv-cache-dtype", "auto", "--quantization=awq")) == QWQ_32B
    assert QWQ_32B.served(FP8_CACHE).token_bytes * 2 == QWQ_32B.token_bytes
    assert QWQ_32B.served(("-q", "fp8")).weight_bytes < 0.6 * QWQ_32B.weight_bytes
    assert QWQ_32B.served(("--kv_cache_dtype", "fp8_e4m3")).value_bytes == 1


def test_a_gpu_is_read_from_nvml(monkeypatch):
    fake = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: H200.name,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=H200.memory_bytes),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert read_gpu() == H200
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_gpu() is None
