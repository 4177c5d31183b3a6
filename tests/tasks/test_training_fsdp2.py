"""FSDP2 spreads the model over its workers and takes the steps that one worker takes, also after a
kill.

accelerate offers FSDP2 on GPUs only. Here it is told that two gloo processes are GPUs: everything
else, from the sharding of the weights to the parts of a checkpoint, is what runs there.
"""

import json
import multiprocessing
import os
import signal
import socket
from multiprocessing.connection import wait

import pytest

from tasks.training.recipe import TrainingRecipe
from tasks.training.trainer import train
from tests.support.training import REASONING, row, tiny_model

# no case waits for a time of its own: this bounds a hang, on a machine under any load
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
# imports take longest: made once, before members are forked
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tasks.training.trainer"])

# odd, so that a worker's last batch of an epoch repeats a row
ROWS = [row(index, reasoning=REASONING * (1 + index * 3 % 8)) for index in range(7)]
# balanced, as in the paper's profile
ONE = TrainingRecipe(
    row_order="balanced",
    gradient_accumulation=4,
    learning_rate=5e-3,
    num_epochs=2,
    lora_dropout=0.0,
    checkpoint_every_steps=1,
)
TWO = ONE.model_copy(update={"workers": 2, "parallelism": "fsdp2"})


def _member(rank, port, recipe, base, out, killed_at, told, gathered=0, mixed=False):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_TORCH_DEVICE": "cpu",
    }
    import torch
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor import DTensor

    from tasks.training import trainer_settings
    from tasks.training.acceleration import layers, training

    # with recomputation, as on GPUs: another way to it restored no adapter
    sharding = trainer_settings.sharding
    trainer_settings.sharding = lambda recipe, gpu: sharding(recipe, gpu=True)
    if mixed:  # as accelerate does with bf16 on GPUs
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        exchange = layers.exchange_in_float32

        def exchange_mixed(made):
            made.accelerator.state.fsdp_plugin.mixed_precision_policy = policy
            exchange(made)

        layers.exchange_in_float32 = training.exchange_in_float32 = exchange_mixed
    plan = layers._plan
    layers._plan = lambda *given: plan(*given).model_copy(update={"gathered": gathered})
    torch.distributed.init_process_group("gloo")
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)

    def on_log(entry):
        if entry["step"] == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    from trl import SFTTrainer

    shares = []
    real = SFTTrainer.training_step

    def training_step(self, *args, **kwargs):
        weights = [
            parameter for parameter in self.model.parameters() if isinstance(parameter, DTensor)
        ]
        shares.append(
            sum(w.to_local().numel() for w in weights)
            / sum(w.numel() for w in self.model.parameters())
        )
        return real(self, *args, **kwargs)

    SFTTrainer.training_step = training_step
    result = train(ROWS, recipe, base, out, on_log)
    (told / f"{rank}.json").write_text(
        json.dumps(
            {
                "result": result.model_dump(mode="json") | {"history": result.history},
                "share": shares[0],
            }
        )
    )
    torch.distributed.destroy_process_group()


def by_two(recipe, base, out, told, killed_at=-1, gathered=0, mixed=False):
    told.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = (port, recipe, base, out, killed_at, told, gathered, mixed)
    members = [CONTEXT.Process(target=_member, args=(rank, *given)) for rank in range(2)]
    for member in members:
        member.start()
    running = {member.sentinel: member for member in members}
    while running:
        for sentinel in wait(list(running)):
            if running.pop(sentinel).exitcode:
                for other in running.values():
                    other.kill()  # as Ray Train does with a group that lost a worker
    expected = -signal.SIGKILL if killed_at > 0 else 0
    assert members[0].exitcode == expected, "see its traceback above"
    return [json.loads(path.read_text()) for path in sorted(told.glob("*.json"))]


def test_two_processes_share_the_model_take_the_steps_of_one_and_go_on_exactly(tmp_path):
    base = tiny_model(tmp_path / "small")
    first, second = by_two(TWO, base, tmp_path / "whole", tmp_path / "told")
    alone = train(ROWS, ONE, base, tmp_path / "alone")
    assert first["share"] == pytest.approx(0.5, abs=0.01)
    assert second["share"] == pytest.approx(0.5, abs=0.01)
    history = first["result"]["history"]
    assert [entry["loss"] for entry in history] == pytest.approx(
        [entry["loss"] for entry in alone.history], rel=1e-5
    )
    assert [entry["num_tokens"] for entry in history] == [
        entry["num_tokens"] for entry in alone.history
    ]

    assert by_two(TWO, base, tmp_path / "killed", tmp_path / "none", killed_at=3) == []
    resumed, _ = by_two(TWO, base, tmp_path / "killed", tmp_path / "told-again")
    assert resumed["result"]["resumed_from_step"] == 2
    assert resumed["result"]["history"] == history, "to the last bit"
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "killed" / "adapter" / name).read_bytes() == (
            tmp_path / "whole" / "adapter" / name
        ).read_bytes()
    weights = (
        tmp_path / "alone" / "adapter" / "adapter_model.safetensors",
        tmp_path / "whole" / "adapter" / "adapter_model.safetensors",
    )
    from safetensors.torch import load_file

    left, right = (load_file(path) for path in weights)
    assert left.keys() == right.keys(), "the same adapter for whoever loads it"
    assert {name: tensor.shape for name, tensor in left.items()} == {
        name: tensor.shape for name, tensor in right.items()
    }


def test_accelerated_they_take_the_same_steps_and_go_on_exactly(tmp_path):
    """Two rows a step, with layers that stay gathered over the passes of a step, which the
    adapter's weights must not outlive."""
    base = tiny_model(tmp_path / "small")
    more = {"num_epochs": 3, "gradient_accumulation": 4}
    recipe, one = (each.model_copy(update=more | {"acceleration": "on"}) for each in (TWO, ONE))
    alone = train(ROWS, one, base, tmp_path / "alone")
    first, _ = by_two(recipe, base, tmp_path / "whole", tmp_path / "told", gathered=2)
    history = first["result"]["history"]
    assert len(history) == len(alone.history) >= 6
    for name in ("loss", "grad_norm"):
        assert [entry[name] for entry in history] == pytest.approx(
            [entry[name] for entry in alone.history], rel=1e-4
        )

    dropout = recipe.model_copy(update={"lora_dropout": 0.3})
    whole, _ = by_two(dropout, base, tmp_path / "dropped", tmp_path / "told-dropped")
    assert by_two(dropout, base, tmp_path / "killed", tmp_path / "none", killed_at=3) == []
    resumed, _ = by_two(dropout, base, tmp_path / "killed", tmp_path / "told-again")
    assert resumed["result"]["resumed_from_step"] == 2
    assert resumed["result"]["history"] == whole["result"]["history"], "with the same masks"


@pytest.mark.parametrize("acceleration", ["off", "on"])
def test_with_weights_in_bfloat16_several_passes_make_a_step(tmp_path, acceleration):
    """TRL's loss calls the head past FSDP2, which then has never gathered it."""
    base = tiny_model(tmp_path / "small")
    recipe = TWO.model_copy(update={"acceleration": acceleration})
    alone = train(ROWS, ONE, base, tmp_path / "alone")
    mixed, _ = by_two(recipe, base, tmp_path / "mixed", tmp_path / "told", gathered=2, mixed=True)
    losses = [
        [entry["loss"] for entry in each] for each in (mixed["result"]["history"], alone.history)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2) and losses[0] != losses[1]
