"""The tasks that a run trains on: none that the benchmark knows, each once, and a manifest that
says why one is missing."""

import pytest

from kernels_eval.errors import UsageError
from kernels_eval.records import KernelTask
from tasks.decontamination.config import DecontaminationConfig, DeduplicationConfig
from tasks.decontamination.stage import run as choose
from tasks.sources.stage import keep, read_tasks
from tasks.workload import stage as workloads
from tests.support.cases import cases

CASES = cases("training")

CODE = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.{layer} = nn.Linear(width, {size})

    def forward(self, x):
        return {answer}

def get_inputs():
    return [torch.randn(16, {width})]

def get_init_inputs():
    return [{width}]
"""
ON, OFF = DecontaminationConfig(), DecontaminationConfig(enabled=False)
ONCE, AS_OFTEN = DeduplicationConfig(), DeduplicationConfig(enabled=False)


def code(answer, layer="layer", width=32, size=8):
    return CODE.format(answer=answer, layer=layer, width=width, size=size)


def snapshot(root, **codes):
    return keep(
        [KernelTask(task_id=f"user/{name}", name=name, code=text) for name, text in codes.items()],
        str(root),
        {},
    )


def run(tasks, benchmark, decontamination, deduplication):
    """Measure the workloads, then choose, as a refresh does."""
    measured = [ref and workloads.run(ref) for ref in (tasks, benchmark)]
    return choose(tasks, benchmark, decontamination, deduplication, *measured)


KNOWN = code("torch.softmax(torch.relu(self.layer(x)).cumsum(0), dim=1)")


@pytest.fixture
def benchmark(tmp_path):
    return snapshot(tmp_path, known=KNOWN)


@pytest.fixture
def tasks(tmp_path):
    return snapshot(
        tmp_path,
        twin=code("torch.tanh(self.other(x) * 3.0)", layer="other"),
        renamed=code("torch.softmax(torch.relu(self.mine(x)).cumsum(0), dim=1)", layer="mine"),
        resized=code("torch.softmax(torch.relu(self.layer(x)).cumsum(0), dim=1)", width=64),
        fresh=code("torch.tanh(self.layer(x) * 3.0)"),
        same=KNOWN,
    )


def names(ref):
    return [task.name for task in read_tasks(ref)]


def test_what_the_benchmark_knows_is_left_out_and_so_is_what_repeats_another(tasks, benchmark):
    chosen = run(tasks, benchmark, ON, ONCE)
    manifest = chosen.open().manifest
    assert names(chosen) == ["fresh"]
    assert manifest["status_counts"] == {"kept": 1, "known to the benchmark": 3, "repeated": 1}
    removed = {
        row["task_id"]: [row["level"], row["benchmark_task_id"]]
        for row in manifest["decontamination"]["removed"]
    }
    assert removed == CASES["removed_tasks"]
    assert [(row["id"], row["equals"]) for row in manifest["deduplication"]["removed"]] == [
        ("user/twin", "user/fresh")
    ]
    assert "3 of 5 training tasks are left out." in manifest["report"]


def test_tasks_are_kept_as_they_were_and_in_their_order(tasks, benchmark):
    both_off = run(tasks, None, OFF, AS_OFTEN)
    assert read_tasks(both_off) == read_tasks(tasks)
    assert names(run(tasks, benchmark, ON, AS_OFTEN)) == ["twin", "fresh"]
    assert names(run(tasks, None, OFF, ONCE)) == ["renamed", "resized", "fresh"], (
        "of equals the smallest id stays"
    )


def test_the_same_choice_is_one_snapshot_and_another_benchmark_is_another(
    tasks, benchmark, tmp_path
):
    first = run(tasks, benchmark, ON, ONCE)
    assert run(tasks, benchmark, ON, ONCE) == first
    other = run(
        tasks,
        snapshot(tmp_path, unknown=code("torch.sigmoid(x).matmul(self.layer.weight.t()).exp()")),
        ON,
        ONCE,
    )
    assert other != first and "renamed" in names(other)


def test_a_set_that_the_benchmark_knows_whole_is_refused_with_the_ways_out(tmp_path, benchmark):
    with pytest.raises(
        UsageError, match=r"all 1 training tasks are known to the benchmark \(1 exact\)"
    ) as error:
        run(snapshot(tmp_path, same=KNOWN), benchmark, ON, ONCE)
    assert "decontamination.enabled=false" in str(error.value)
