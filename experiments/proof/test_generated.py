"""Generated tasks are the same everywhere, their sides are disjoint, and their programs depend on
their inputs."""

import os
import subprocess
import sys

import polars as pl
import pytest
import torch

from experiments.proof import generated
from experiments.proof.program import FAMILIES, OPERATORS, parse
from kernels_eval.errors import UsageError
from kernels_eval.records import stable_hash
from tasks.decontamination.config import DecontaminationConfig
from tasks.decontamination.decontamination import decontaminate
from tasks.sources import stage
from tasks.sources.config import TasksConfig
from tasks.workload.stage import annotate


def test_the_same_arguments_give_the_same_tasks_in_every_process():
    program = (
        "from experiments.proof.generated import load;"
        " from kernels_eval.records import stable_hash;"
        " print(stable_hash([task.model_dump() for task in load(3, 60, 'train', 'cuda')]))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "17"}
    printed = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    tasks = generated.load(3, 60, "train", "cuda")
    assert printed.stdout.strip() == stable_hash([task.model_dump() for task in tasks])


def test_fewer_tasks_are_the_first_of_more_and_all_are_distinct():
    tasks = generated.load(0, 600)
    assert generated.load(0, 40) == tasks[:40]
    assert len({task.name for task in tasks}) == len({task.task_id for task in tasks}) == 600
    assert {task.family for task in tasks} == set(FAMILIES)
    assert {task.level for task in tasks} == {1, 2, 3, 4, 5}
    assert {name for task in tasks for name in parse(task.code).names} == set(OPERATORS)
    assert {task.code for task in generated.load(1, 40)} != {task.code for task in tasks[:40]}


@pytest.mark.slow
def test_decontamination_finds_nothing_of_one_side_in_the_other():
    train, held_out = generated.load(0, 80), generated.load(1, 30, "heldout")

    def frame(tasks):
        return annotate(pl.DataFrame([task.model_dump() for task in tasks]))

    assert {task.name for task in train}.isdisjoint(task.name for task in held_out)
    found = decontaminate(frame(train), frame(held_out), DecontaminationConfig())
    assert found.removed.is_empty() and not found.untraced
    again = decontaminate(frame(held_out), frame(held_out), DecontaminationConfig())
    assert len(again.removed) == 30  # it would find them


def test_sizes_and_order_do_not_change_a_programs_side():
    for task in generated.load(0, 30, "heldout", "cuda"):
        names = parse(task.code).names
        assert generated.side_of(names) == generated.side_of(names[::-1]) == "heldout"


def test_a_program_is_read_from_its_text_and_from_no_other():
    for language in ("cpp", "cuda"):
        for task in generated.load(2, 150, "all", language):
            program = parse(task.code)
            assert program.render() == task.code
            assert "_".join(program.names) == task.name and program.family == task.family
    assert parse(task.code.replace("return x", "return x + 1")) is None
    assert parse(task.code + "\n") is None
    assert parse("import torch") is None


def test_every_output_is_finite_and_depends_on_every_input():
    for task in generated.load(4, 60, "all"):
        scope = {}
        exec(task.code, scope)
        torch.manual_seed(0)
        model, inputs = scope["Model"](), scope["get_inputs"]()
        first = model(*inputs)
        assert torch.isfinite(first).all(), task.name
        assert first.shape[0] == parse(task.code).rows
        for index in range(len(inputs)):
            changed = list(inputs)
            changed[index] = torch.randn_like(inputs[index])
            difference = (model(*changed) - first).square().mean() / first.square().mean()
            assert difference > 1e-8  # relative RMS 1e-4, ten times the gate, task.name


def test_the_source_fills_the_columns(tmp_path):
    config = TasksConfig(source="generated", options={"count": 20}, limit=5, split="heldout")
    rows = stage.run(config, str(tmp_path)).open().read()
    assert rows.height == 5 and set(rows["source"]) == {"generated"}
    assert set(rows["family"]) <= set(FAMILIES) and rows["level"].is_between(1, 5).all()
    assert stage.read_tasks(stage.run(config, str(tmp_path))) == generated.load(0, 5, "heldout")


def test_more_tasks_than_there_are_is_an_error(monkeypatch):
    monkeypatch.setattr(generated, "DRAWS", 3)
    monkeypatch.setattr(generated, "MOST_FAILURES", 2)
    with pytest.raises(
        UsageError, match=r"of 100000 generated heldout tasks .*tasks\.options\.count"
    ):
        generated.load(0, 100_000, "heldout")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"coun": 3}, r"tasks\.options\.coun: .*seed, count, sizes"),
        ({"count": 0}, "greater than 0"),
    ],
)
def test_a_wrong_setting_is_named(options, message):
    with pytest.raises(UsageError, match=message):
        stage.load_tasks(TasksConfig(source="generated", options=options))
