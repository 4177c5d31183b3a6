"""Tokens per second, utilisation and the machine's numbers in the training log, by hand and in a
real training."""

import pytest

from benchmarks.shapes import QWQ_32B
from kernels_eval.profile import roofline
from kernels_eval.profile.roofline import peak_flops
from tasks.models import load_causal_model, load_tokenizer
from tasks.training import trainer
from tasks.training.formatting import examples_of
from tasks.training.recipe import TrainingRecipe
from tasks.training.telemetry import (
    SPEED,
    TrainingFlops,
    mfu,
    multiplied_parameters,
)
from tests.support.training import adapted_qwen, row


@pytest.fixture(scope="module")
def qwq():
    """QwQ-32B's shape with the recipe's adapter, without weights."""
    import torch

    with torch.device("meta"):
        return adapted_qwen(rank=32, head_dim=128, **QWQ_32B)


def test_flops_of_qwq_by_hand(qwq):
    """Layers of 5,120 x (2 x 5,120 + 2 x 1,024 + 3 x 27,648) weights, a head of 152,064 x 5,120
    for 80 % of the tokens, 268,435,456 adapter parameters, 64 x 5,120 of attention's width."""
    layers = 64 * 5120 * (2 * 5120 + 2 * 1024 + 3 * 27_648)
    products = 4 * (layers + 0.8 * 152_064 * 5120) + 6 * 268_435_456
    flops = TrainingFlops.of(qwq, 0.8)
    assert flops.per_token == pytest.approx(products, rel=1e-12)
    assert flops.per_pair == 3 * 2 * 64 * 5120
    assert flops.row(8192) == pytest.approx(8192 * (products + 3 * 2 * 64 * 5120 * 8192), rel=1e-12)


def test_mfu_is_the_published_one_of_the_measured_speed(qwq):
    """3,416 tokens/s of rows of 8,192 on one H200: benchmarks/results, 2026-11-22."""
    per_token = TrainingFlops.of(qwq, 0.8).row(8192) / 8192
    assert mfu(3416 * per_token, 989e12) == pytest.approx(0.501, abs=5e-4)
    assert mfu(3416 * per_token, 989e12, devices=2) == pytest.approx(0.501 / 2, abs=5e-4)
    assert mfu(3416 * per_token, None) is None


def test_peaks_go_by_name():
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 9.89e14
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 3.12e14
    assert peak_flops("a card of tomorrow") is None and peak_flops(None) is None


def test_the_table_of_embeddings_multiplies_nothing_unless_it_is_the_output(base):
    import torch

    model = load_causal_model(base, dtype=torch.float32)
    everything, table = (
        sum(p.numel() for p in model.parameters() if p.ndim > 1),  # norms multiply no matrix
        model.get_input_embeddings().weight.numel(),
    )
    assert multiplied_parameters(model) == everything - table
    model.lm_head.weight = model.get_input_embeddings().weight
    assert multiplied_parameters(model) == everything - table, "tied: the one table, as output"


@pytest.mark.slow
def test_a_training_writes_its_speed_without_evaluation_and_what_the_machine_did(
    base, tmp_path, monkeypatch
):
    from transformers import TrainerCallback

    class Clock:
        """Every step takes 2 s, every evaluation a day."""

        now = 0.0

        def perf_counter(self):
            return self.now

    clock = Clock()

    class Passing(TrainerCallback):
        def on_step_end(self, *_, **__):
            clock.now += 2.0

        def on_prediction_step(self, *_, **__):
            clock.now += 86_400.0

    monkeypatch.setattr(trainer, "time", clock)
    monkeypatch.setattr(roofline, "peak_flops", lambda name: 1e9)
    tokenizer = load_tokenizer(base)
    examples = examples_of([row(number) for number in range(8)], tokenizer)
    recipe = TrainingRecipe(num_epochs=2, batch_size=2, gradient_accumulation=1, lora_rank=2)
    made = trainer.LoraTrainer(
        recipe.resolve(gpu=False), base, tmp_path, tokenizer, examples[:6], examples[6:]
    )
    made.add_callback(Passing())
    made.train()
    steps = [entry for entry in made.state.log_history if "loss" in entry]
    assert len(steps) == 6
    lengths = [example.tokens for example in examples[:6]]
    share = sum(example.completion_tokens for example in examples[:6]) / sum(lengths)
    flops = TrainingFlops.of(made.model, share)
    per_token = sum(flops.row(tokens) for tokens in lengths) / sum(lengths)
    before = 0.0
    for entry in steps:
        assert entry["tokens_per_s"] == pytest.approx((entry["num_tokens"] - before) / 2.0)
        assert entry["mfu"] == pytest.approx(entry["tokens_per_s"] * per_token / 1e9)
        before = entry["num_tokens"]
        assert entry.keys() >= set(SPEED) and entry["memory_gb"] > 0.05, "torch alone is more"
    evaluations = [entry for entry in made.state.log_history if "eval_loss" in entry]
    assert len(evaluations) == 3
    assert not any(name in entry for entry in evaluations for name in SPEED)
