"""The speed benchmark: what it counts, what it prints of variants that fail, and one run of it on a
CPU."""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time

import pytest

from benchmarks.training_speed import (
    FSDP2,
    VARIANTS,
    train,
)
from benchmarks.training_subject import rows
from benchmarks.training_tables import table, tokens_per_s
from tasks.training.acceleration.layers import AccelerationOptions


def result(variant, seconds, losses, **more):
    return {"variant": variant, "length": 8192, "step_s": seconds, "losses": losses, **more}


def test_the_first_steps_are_left_out_and_the_median_counts():
    assert tokens_per_s(result("trl", [60.0, 5.0, 5.0, 4.0, 2.0, 4.0], [])) == 8192 / 4
    assert tokens_per_s(result("trl", [60.0, 5.0, 5.0], [])) is None


def test_rows_are_the_same_for_all_variants_and_two_take_turns():
    made = rows(64, 512, 5)
    assert made == rows(64, 512, 5)
    assert made["input_ids"][0] == made["input_ids"][2] != made["input_ids"][1]
    assert all(0 < token < 512 for token in made["input_ids"][0])
    assert made["labels"][0] == [-100] * 13 + made["input_ids"][0][13:]


def test_the_table_compares_with_trl_and_tells_of_failures():
    lines = table(
        [
            result(
                "ours",
                [1.0] * 3 + [2.0],
                [3.0, 2.5],
                plan="64 kept",
                peak_allocated_gb=120.0,
                peak_reserved_gb=125.0,
            ),
            result("trl", [1.0] * 3 + [4.0], [3.0, 2.0]),
            result("liger", [], [], error="OutOfMemoryError: no | room"),
        ]
    ).splitlines()
    assert len(lines) == 5
    assert (
        "| 4,096 | 2.00 |" in lines[2]
        and "5.00e-01, 2.50e-01" in lines[2]
        and "120.0 / 125.0" in lines[2]
    )
    assert "| 2,048 | 1.00 |" in lines[3]
    assert "OutOfMemoryError: no / room" in lines[4]


def test_losses_are_compared_with_float32_where_that_ran():
    lines = table(
        [result("ours", [], [3.0]), result("trl", [], [2.0]), result("trl_float32", [], [2.75])]
    ).splitlines()
    assert "2.50e-01" in lines[2] and "7.50e-01" in lines[3] and "0.00e+00" in lines[4]


def test_every_variant_has_valid_options():
    for options, _ in VARIANTS.values():
        if options is not None:
            AccelerationOptions(**options)


def test_fsdp2_is_what_training_gets_and_needs_two():
    from tasks.training.recipe import TrainingRecipe
    from tasks.training.trainer_settings import sharding

    recipe = TrainingRecipe(workers=2, parallelism="fsdp2", acceleration="off")
    assert sharding(recipe, gpu=True) == FSDP2
    accelerated = recipe.model_copy(update={"acceleration": "on"})
    assert sharding(accelerated, gpu=True) == VARIANTS["ours_fsdp2"][1]
    command = [sys.executable, "-m", "benchmarks.training_speed", "--variants", "trl_fsdp2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "give --gpus 2 or more" in done.stderr


def _member(rank, port, variant, out):
    """One of two gloo processes, for FSDP2 told that they are GPUs: accelerate has it there
    alone."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "ACCELERATE_TORCH_DEVICE": "cpu"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    torch.distributed.init_process_group("gloo")
    if variant.endswith("fsdp2"):
        PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    order = {"shape": "tiny", "variant": variant, "length": 64, "steps": 4, "dropout": 0.0}
    order |= {"gpus": 2, "passes": 1, "budget_s": 300, "report": str(out)}
    train(order, {"losses": [], "step_s": []}, time.monotonic())
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_learn_the_same_with_ddp_and_with_fsdp2(tmp_path):
    context, losses = multiprocessing.get_context("spawn"), []
    for variant in ("trl", "trl_fsdp2", "ours_fsdp2"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        members = [
            context.Process(target=_member, args=(rank, port, variant, tmp_path / variant))
            for rank in range(2)
        ]
        for member in members:
            member.start()
        for member in members:
            member.join(timeout=250)
            assert member.exitcode == 0
        losses.append(json.loads((tmp_path / variant).read_text())["losses"])
    assert len(losses[0]) >= 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)
    assert max(losses[0]) - min(losses[0]) > 1e-3 * max(losses[0]), "steps differ by far more"


@pytest.mark.slow
def test_without_dropout_both_learn_the_same(tmp_path):
    out = tmp_path / "results.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.training_speed",
        "--shape",
        "tiny",
        "--variants",
        "trl,ours_eager",
        "--dropout",
        "0",
    ]
    done = subprocess.run(
        [*command, "--steps", "5", "--out", str(out)], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    theirs, ours = json.loads(out.read_text())
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-5)
    assert theirs["losses"][-1] < theirs["losses"][0]
    assert "| trl |" in done.stdout and "| ours_eager |" in done.stdout
