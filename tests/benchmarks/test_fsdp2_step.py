"""The FSDP2 benchmark trains what the recipe trains, and its launcher works with gloo where there
is no GPU."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import fsdp2_step
from tasks.training.recipe import TrainingRecipe


def test_the_adapter_is_the_recipes():
    recipe = TrainingRecipe()
    assert {
        "r": recipe.lora_rank,
        "lora_alpha": recipe.lora_alpha,
        "lora_dropout": recipe.lora_dropout,
        "target_modules": list(recipe.target_modules),
    } == fsdp2_step.LORA
    assert (recipe.learning_rate, recipe.weight_decay) == (
        fsdp2_step.LEARNING_RATE,
        fsdp2_step.WEIGHT_DECAY,
    )
    assert recipe.max_grad_norm == fsdp2_step.MAX_GRAD_NORM


@pytest.mark.slow
def test_two_processes_take_steps_and_the_loss_falls(tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.fsdp2_step",
        "--gpus",
        "2",
        "--shape",
        "tiny",
        "--cpu",
        "--steps",
        "4",
    ]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out.json")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert result["gpus"] == 2 and result["tokens_per_s"] > 0 and len(result["peak_gib"]) == 2
    assert result["trained_parameters"] == 2 * 32 * (
        64 * 2 + 2 * (64 + 32) + 64 * 2 + 3 * (64 + 128)
    ), "seven projections of two layers"
    losses = result["losses"]
    assert (
        len(losses) == 6
        and losses[0] == pytest.approx(math.log(512), abs=0.1)
        and losses[-1] < losses[0]
    )
