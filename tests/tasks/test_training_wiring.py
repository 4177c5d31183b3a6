"""What the recipe switches on reaches the run: held-out tasks, early stop, the log's columns,
acceleration."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import GPTNeoXConfig, LlamaConfig, Qwen3MoeConfig

from kernels_eval.errors import UsageError
from tasks.training.acceleration import layers
from tasks.training.acceleration.layers import AccelerationOptions, accelerate
from tasks.training.preparation import with_parallelism
from tasks.training.recipe import TrainingRecipe
from tasks.training.result import HELD_OUT, HISTORY
from tasks.training.trainer import train
from tests.support.training import row

RECIPE = TrainingRecipe(gradient_accumulation=2, num_epochs=2, learning_rate=5e-3, held_out=2)
ROWS = [row(index) for index in range(8)]


@pytest.fixture(scope="module")
def plain(base, tmp_path_factory):
    return train(ROWS, RECIPE, base, tmp_path_factory.mktemp("plain"))


def test_held_out_tasks_are_not_trained_on_and_their_loss_falls(plain):
    assert plain.rows == 6 and plain.held_out_rows == plain.held_out_tasks == 2
    assert [entry["step"] for entry in plain.held_out] == [0, 3, 6]
    assert plain.held_out[-1]["loss"] < plain.held_out[0]["loss"]


def test_the_log_holds_every_step_once_with_what_it_took(plain):
    log = plain.log
    assert [entry["step"] for entry in log] == [0, 1, 2, 3, 4, 5, 6]
    assert all(set(entry) == set(HISTORY.names) for entry in log)
    assert [entry["step"] for entry in log if entry[HELD_OUT] is not None] == [0, 3, 6]
    assert log[0]["loss"] is None and all(math.isfinite(entry["loss"]) for entry in log[1:])
    assert all(entry["tokens_per_s"] > 0 and entry["memory_gb"] > 0 for entry in log[1:])
    assert plain.batches["rows_mean"] == 2 and plain.batches["tokens_mean"] > 2


@pytest.mark.slow
def test_padded_rows_do_not_meet_cudnns_attention(base, tmp_path):
    """Its gradients of a masked row can be NaN (tasks.models.attention_of_any_length)."""
    allowed = []
    recipe = RECIPE.model_copy(update={"batch_size": 2, "num_epochs": 1, "acceleration": "off"})

    def told(_):
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())

    assert torch.backends.cuda.cudnn_sdp_enabled()
    train(ROWS, recipe, base, tmp_path, told)
    assert allowed and not any(allowed) and torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.slow
def test_accelerated_rows_teach_the_same(base, tmp_path, monkeypatch):
    """Without dropout, whose masks differ, and uncompiled (test_layers compiles)."""
    uncompiled = partial(accelerate, options=AccelerationOptions(compile=False))
    monkeypatch.setattr(layers, "accelerate", uncompiled)
    recipe = RECIPE.model_copy(update={"lora_dropout": 0.0, "gradient_accumulation": 6})
    alone = train(ROWS, recipe, base, tmp_path / "alone")
    accelerated = recipe.model_copy(update={"acceleration": "on"})
    ours = train(ROWS, accelerated, base, tmp_path / "accelerated")
    assert [entry["step"] for entry in ours.history] == [1, 2]
    for entry, plain_entry in zip(ours.history, alone.history, strict=True):
        assert entry["loss"] == pytest.approx(plain_entry["loss"], rel=1e-4)
        assert entry["grad_norm"] == pytest.approx(plain_entry["grad_norm"], rel=1e-3)
    measured = [run.held_out[-1]["loss"] for run in (ours, alone)]
    assert measured[0] == pytest.approx(measured[1], rel=1e-3), "through the same attention"


def test_one_worker_has_nothing_to_decide(base, tmp_path):
    result = train(ROWS, RECIPE, base, tmp_path)
    assert result.decided == {}
    again = train(ROWS, RECIPE.model_copy(update={"parallelism": "fsdp2"}), base, tmp_path)
    assert again.resumed_from_step == again.steps, "the same run"


def with_gpu(monkeypatch, memory_bytes):
    gpu = SimpleNamespace(total_memory=memory_bytes)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: gpu)


def test_several_workers_without_a_gpu_hold_the_model_each(base, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    two = TrainingRecipe(parallelism="auto", workers=2)
    recipe, decided = with_parallelism(two, base, 4096)
    assert recipe.parallelism == "ddp" and decided == {"parallelism": "ddp: without a GPU"}


@pytest.mark.parametrize(("experts", "chosen"), [(2, "ddp"), (512, "fsdp2")])
def test_the_weights_of_all_experts_count(tmp_path, monkeypatch, experts, chosen):
    """Of 512 experts, 0.5 GB, one GPU of this size holds none of the activations."""
    config = Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=1024,
        num_experts=experts,
        num_hidden_layers=2,
        vocab_size=100,
    )
    config.save_pretrained(tmp_path)
    with_gpu(monkeypatch, 400 << 20)
    two = TrainingRecipe(parallelism="auto", workers=2)
    recipe, decided = with_parallelism(two, tmp_path, 256)
    assert recipe.parallelism == chosen and decided["parallelism"].startswith(chosen)


@pytest.mark.parametrize(("megabytes", "chosen"), [(4, "ddp"), (0, "fsdp2")])
def test_ddp_needs_main_memory_for_each_workers_model(tmp_path, monkeypatch, megabytes, chosen):
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=100)
    config.save_pretrained(tmp_path)
    with_gpu(monkeypatch, 400 << 20)
    monkeypatch.setattr(
        "tasks.training.acceleration.offloading.free_bytes", lambda: megabytes << 20
    )
    two = TrainingRecipe(parallelism="auto", workers=2)
    recipe, decided = with_parallelism(two, tmp_path, 256)
    assert recipe.parallelism == chosen and decided["parallelism"].startswith(chosen)


def test_a_model_of_another_form_is_refused_by_auto(tmp_path, monkeypatch):
    GPTNeoXConfig(num_hidden_layers=2, hidden_size=64, vocab_size=100).save_pretrained(tmp_path)
    with_gpu(monkeypatch, 1 << 30)
    with pytest.raises(UsageError, match="cannot be planned: .*num_key_value_heads"):
        with_parallelism(TrainingRecipe(parallelism="auto", workers=2), tmp_path, 256)
