"""A training process that is killed at any moment costs time and nothing else: the same losses and
the same adapter, byte for byte."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tasks.training.recipe import TrainingRecipe
from tasks.training.trainer import train
from tests.support.training import adapter_bytes, die_while_training, row

pytestmark = pytest.mark.slow

# 6 rows, 2 passes a step: 3 steps an epoch, 9 in all, 18 passes. Checkpoints after steps 2, 3, 4,
# 6, 8 and 9.
RECIPE = TrainingRecipe(gradient_accumulation=2, learning_rate=5e-3, checkpoint_every_steps=2)
ROWS = [row(index) for index in range(6)]


@pytest.fixture(scope="module")
def killed(base, tmp_path_factory):
    """Killed between the two passes of step 5, in the middle of the second epoch. Meanwhile this
    process trains."""
    out = tmp_path_factory.mktemp("killed")
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield out, pool.submit(die_while_training, ROWS, RECIPE, base, [("training_step", 9, out)])


@pytest.fixture(scope="module")
def uninterrupted(base, killed, tmp_path_factory):
    return train(ROWS, RECIPE, base, tmp_path_factory.mktemp("whole"))


def goes_on_exactly(base, out, uninterrupted, from_step):
    seen = []
    result = train(ROWS, RECIPE, base, out, lambda entry: seen.append(entry["step"]))
    assert result.resumed_from_step == from_step
    assert seen == list(range(from_step + 1, 10)), "nothing is done twice"
    assert result.history == uninterrupted.history, (
        "losses, gradient norms, learning rates and tokens, to the last bit"
    )
    assert adapter_bytes(result) == adapter_bytes(uninterrupted)


def test_killed_between_two_passes_of_a_step_in_the_middle_of_an_epoch(base, uninterrupted, killed):
    out, death = killed
    death.result()
    assert not (out / "adapter").exists()
    goes_on_exactly(base, out, uninterrupted, from_step=4)


def test_killed_anywhere(base, uninterrupted, tmp_path):
    deaths = {
        ("training_step", 1): 0,  # in the first step
        ("training_step", 4): 0,  # before step 2 is done
        ("training_step", 5): 2,  # between two passes, in the first epoch
        ("training_step", 7): 3,  # in the first step of the second epoch
        ("training_step", 14): 6,  # before the optimiser's step 7
        ("training_step", 18): 8,  # before the last
        ("_save_rng_state", 1): 0,  # while the first checkpoint is written
        ("_save_rng_state", 5): 6,  # while that of step 8 is
        ("_save_rng_state", 6): 8,  # while the last is
    }
    outs = {death: tmp_path / f"{death[0]}-{death[1]}" for death in deaths}
    die_while_training(ROWS, RECIPE, base, [(*death, out) for death, out in outs.items()])
    for death, from_step in deaths.items():
        goes_on_exactly(base, outs[death], uninterrupted, from_step)


def test_killed_twice(base, uninterrupted, tmp_path):
    out = tmp_path / "run"
    die_while_training(ROWS, RECIPE, base, [("training_step", 5, out), ("training_step", 7, out)])
    goes_on_exactly(
        base, out, uninterrupted, from_step=4
    )  # 5 passes, then 4 to 11 from step 2: 7 passes end in step 6


def test_checkpoints_are_bounded_and_all_marked(uninterrupted):
    kept = sorted((uninterrupted.adapter_dir.parent / "checkpoints").glob("checkpoint-*"))
    assert [path.name for path in kept] == ["checkpoint-8", "checkpoint-9"]
    for path in kept:
        files = {file.name for file in path.iterdir()}
        adapter = {"adapter_model.safetensors", "adapter_config.json"}
        assert (
            adapter
            | {
                "optimizer.pt",
                "scheduler.pt",
                "rng_state.pth",
                "trainer_state.json",
                "complete",
            }
            <= files
        )
