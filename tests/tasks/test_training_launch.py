"""Several workers train as one would, survive the loss of one, and end with their caller."""

import os
import signal
import subprocess
import sys
from queue import SimpleQueue

import psutil
import pytest

from kernels_eval.errors import UsageError
from tasks.training import launch
from tasks.training.launch import train_on_ray
from tasks.training.recipe import TrainingRecipe
from tasks.training.trainer import train
from tests.support.pools import start_ray_here
from tests.support.training import EXHAUSTED, REASONING, adapter_bytes, exhaust_memory, row
from tests.support.waiting import until

# odd, so that a worker's last batch of an epoch repeats a row
ROWS = [row(index, reasoning=REASONING * (1 + index % 3)) for index in range(7)]
# without dropout, whose masks differ between workers; 4 steps an epoch of 2 rows, one for each
# worker
ONE = TrainingRecipe(
    gradient_accumulation=2,
    learning_rate=5e-3,
    num_epochs=2,
    lora_dropout=0.0,
    checkpoint_every_steps=1,
)
TWO = ONE.model_copy(update={"workers": 2, "parallelism": "ddp"})


@pytest.fixture(scope="module")
def ray_here():
    import ray

    hook = {"worker_process_setup_hook": exhaust_memory}
    start_ray_here(num_cpus=2, num_gpus=0, runtime_env=hook)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def by_two(ray_here, base, tmp_path_factory):
    return train_on_ray(ROWS, TWO, base, tmp_path_factory.mktemp("two"))


def workers():
    """The processes of Ray Train's workers that this test started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "RayTrainWorker" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def nothing_is_left(ray_here, processes):
    psutil.wait_procs(processes)
    until(lambda: ray_here.available_resources().get("CPU") == 2, "the end of the group's work")


@pytest.mark.slow
def test_two_workers_take_the_steps_that_one_takes(base, by_two, tmp_path):
    alone = train(ROWS, ONE, base, tmp_path)
    assert by_two.workers == 2 and by_two.steps == alone.steps == 8
    assert by_two.tokens == alone.tokens
    # the same rows in every step and every token weighs the same; what is left is the order in
    # which float32 sums are taken (2^-24 each, over some hundred tokens a step), and what eight
    # optimiser steps make of it
    for together, single in zip(by_two.history, alone.history, strict=True):
        assert together["loss"] == pytest.approx(single["loss"], rel=1e-5)
        assert together["grad_norm"] == pytest.approx(single["grad_norm"], rel=1e-3)
        assert together["learning_rate"] == single["learning_rate"]


@pytest.mark.slow
def test_two_workers_take_the_balanced_steps_that_one_takes(ray_here, base, tmp_path):
    rows = [row(index, reasoning=REASONING * (1 + index * 3 % 8)) for index in range(8)]
    one, two = (recipe.model_copy(update={"row_order": "balanced"}) for recipe in (ONE, TWO))
    alone = train(rows, one, base, tmp_path / "one")
    together = train_on_ray(rows, two, base, tmp_path / "two")
    assert together.batches["busy_share"] > 0.85 and together.tokens == alone.tokens
    for ours, theirs in zip(together.history, alone.history, strict=True):
        assert ours["num_tokens"] == theirs["num_tokens"], "the same rows"
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_the_steps_since_the_checkpoint(base, by_two, tmp_path):
    seen = []

    def kill_one(entry):
        seen.append(entry["step"])
        if len(seen) == 4:
            victim = workers()[-1]
            os.kill(victim.pid, signal.SIGKILL)

    result = train_on_ray(ROWS, TWO, base, tmp_path, kill_one)
    assert len(seen) < 16, "it did not begin anew"
    assert set(seen) == set(range(1, 9))
    assert result.resumed_from_step >= 3
    assert result.history == by_two.history, (
        "to the last bit: the same two workers, from their checkpoint"
    )
    assert adapter_bytes(result) == adapter_bytes(by_two)


@pytest.mark.slow
def test_an_interrupted_caller_leaves_no_worker(ray_here, base, tmp_path):
    left = []

    def interrupt(entry):
        left.extend(workers())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_on_ray(ROWS, TWO, base, tmp_path, interrupt)
    assert len(left) == 2
    nothing_is_left(ray_here, left)


@pytest.mark.slow
def test_what_one_worker_cannot_do_ends_the_run_at_once(ray_here, base, tmp_path):
    """One of two runs out of memory, and the other waits for it in a collective operation."""
    seen = []
    with pytest.raises(
        UsageError,
        match=r"out of memory .*20.00 GiB.*fsdp2",
    ):
        train_on_ray(
            [{**ROWS[0], EXHAUSTED: "1"}, *ROWS[1:]],
            TWO,
            base,
            tmp_path,
            lambda entry: seen.append(entry["step"]),
        )
    assert not seen
    nothing_is_left(ray_here, workers())


def test_more_workers_than_devices_are_refused_with_both_numbers():
    eight = TrainingRecipe(workers=8, parallelism="fsdp2")
    with pytest.raises(
        UsageError, match="8 workers and the Ray cluster has 2 GPUs .*set workers to 2"
    ):
        launch._on_gpus(eight, {"CPU": 64.0, "GPU": 2.0})
    with pytest.raises(
        UsageError, match="8 workers and the Ray cluster has 4 CPU cores and no GPU"
    ):
        launch._on_gpus(eight, {"CPU": 4.0})
    assert launch._on_gpus(eight, {"CPU": 64.0, "GPU": 8.0}) is True
    assert launch._on_gpus(TrainingRecipe(), {"CPU": 1.0}) is False


def test_a_process_that_is_alone_does_not_train_for_two(base, tmp_path):
    with pytest.raises(
        UsageError, match="trains with 2 workers, and 1 were started .*train_on_ray"
    ):
        train(ROWS, TWO, base, tmp_path)


def test_an_installation_without_ray_train_says_so_and_does_not_hang(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.train.torch", None)
    news = SimpleQueue()
    launch._fit(launch.Job([], TrainingRecipe(), "base", tmp_path, tmp_path), False, news)
    kind, why = news.get_nowait()
    assert kind == "end" and "ray.train" in why


TRAIN_HERE = """
import sys
from pathlib import Path
from tasks.training.launch import Job
from tasks.training.recipe import TrainingRecipe
from tests.support.training import row
folder, base = map(Path, sys.argv[1:])
sys.path.insert(0, str(folder))
job = Job([row(0)], TrainingRecipe(num_epochs=1), str(base), folder / "out", folder)
print(job.train(None).steps)
"""


@pytest.mark.slow
def test_a_file_of_the_callers_folder_hides_no_package(base, tmp_path):
    """transformers asks for a package `kernels`, and people have a kernels.py."""
    (tmp_path / "kernels.py").write_text("raise ImportError('the file of the folder')")
    command = [sys.executable, "-c", TRAIN_HERE, str(tmp_path), str(base)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["1"]), done.stderr[-2000:]
