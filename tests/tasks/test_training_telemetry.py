"""Tokens per second, utilisation and the machine's numbers in the training log, by hand and in a
real training."""

import pytest

from kernels_eval.profiling import roofline
from kernels_eval.profiling.roofline import peak_flops
from tasks.sources.small_model import load_causal_model, load_tokenizer
from tasks.training import trainer
from tasks.training.formatting import to_prompt_completion
from tasks.training.recipe import TrainingRecipe
from tasks.training.telemetry import COLUMNS, SYSTEM, mfu, multiplied_parameters
from tests.support.training import row


def test_a_32b_model_without_recomputation_at_the_issues_rate_is_fully_used():
    """An H200 that does 790 TFLOP/s takes 6,025 tokens/s through 32.8 billion parameters at four
    operations each."""
    assert mfu(6025, 32_800_000_000, 790e12) == pytest.approx(1.0, abs=0.01)
    assert mfu(6025, 32_800_000_000, 790e12, devices=2) == pytest.approx(0.5, abs=0.01)
    assert mfu(6025, 32_800_000_000, None) is None


def test_peaks_go_by_name():
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 9.89e14
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 3.12e14
    assert peak_flops("a card of tomorrow") is None and peak_flops(None) is None


def test_the_table_of_embeddings_multiplies_nothing_unless_it_is_the_output(base):
    import torch

    model = load_causal_model(base, dtype=torch.float32)
    everything, table = (
        sum(p.numel() for p in model.parameters()),
        model.get_input_embeddings().weight.numel(),
    )
    assert multiplied_parameters(model) == everything - table
    model.lm_head.weight = model.get_input_embeddings().weight
    assert multiplied_parameters(model) == everything - table, "tied: the one table, as output"


def test_a_training_writes_its_speed_without_evaluation_and_what_the_machine_did(
    base, tmp_path, monkeypatch
):
    import torch
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
    examples = to_prompt_completion([row(number) for number in range(8)], tokenizer)
    recipe = TrainingRecipe(num_epochs=2, batch_size=2, gradient_accumulation=1, lora_rank=2)
    made = trainer.LoraTrainer(
        recipe.resolve(gpu=False), base, tmp_path, tokenizer, examples[:6], examples[6:]
    )
    made.add_callback(Passing())
    made.train()
    steps = [entry for entry in made.state.log_history if "loss" in entry]
    assert len(steps) == 6
    before = 0.0
    for entry in steps:
        assert entry["tokens_per_s"] == pytest.approx((entry["num_tokens"] - before) / 2.0)
        needed = entry["tokens_per_s"] * 4 * multiplied_parameters(made.model)
        assert entry["mfu"] == pytest.approx(needed / 1e9)
        before = entry["num_tokens"]
        assert entry.keys() >= set(COLUMNS) and entry["memory_gb"] > 0.05, "torch alone is more"
        assert 0 <= entry["system/cpu_utilization_percentage"] <= 100
        assert entry["system/system_memory_usage_megabytes"] > 100
        if not torch.cuda.is_available():
            assert all(entry[name] is None for name in SYSTEM[2:])
    evaluations = [entry for entry in made.state.log_history if "eval_loss" in entry]
    assert len(evaluations) == 3
    assert not any(name in entry for entry in evaluations for name in COLUMNS)
