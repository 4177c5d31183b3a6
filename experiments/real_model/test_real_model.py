"""The tables are tasks that the line reads, and held-out operators are not trained on."""

import polars as pl
import pytest
import torch

from experiments.real_model import tables
from tasks.decontamination.config import DecontaminationConfig
from tasks.decontamination.decontamination import decontaminate
from tasks.sources.config import TasksConfig
from tasks.sources.stage import load_tasks
from tasks.workload.stage import annotate

WRITTEN = {task.task_id: task for task in [*tables.published("cpp"), *tables.modules("cpp")]}


def made(task, seed):
    torch.manual_seed(seed)
    names = {}
    exec(task.code, names)
    given = names["get_init_inputs"]()
    args, kwargs = given if task.init_form == "args_kwargs" else (given, {})
    return names[task.entry_point](*args, **kwargs)(*names["get_inputs"]()).float()


@pytest.mark.parametrize("task_id", WRITTEN)
def test_a_written_program_runs_and_depends_on_its_inputs(task_id):
    first, second = made(WRITTEN[task_id], 0), made(WRITTEN[task_id], 1)
    assert torch.isfinite(first).all() and not torch.equal(first, second)


@pytest.mark.parametrize("language", ["cpp", "cuda"])
def test_the_line_reads_the_tables(tmp_path, language):
    tables.write(language, tmp_path)
    for name, tasks in (("heldout", tables.heldout(language)), ("train", tables.train(language))):
        config = TasksConfig(source="files", location=str(tmp_path / f"{name}.jsonl"))
        assert [task.model_copy(update={"family": None}) for task in tasks] == load_tasks(config)
    assert len({task.task_id for task in tables.published(language)}) >= 60


def test_a_training_task_that_is_a_held_out_operator_is_found():
    def frame(*tasks):
        return annotate(pl.DataFrame([task.model_dump() for task in tasks]))

    relu, mish = WRITTEN["published/19_relu"], WRITTEN["module/Mish"]
    again = relu.model_copy(update={"task_id": "train/relu", "code": f"{relu.code}\n# again\n"})
    found = decontaminate(frame(again, mish), frame(relu), DecontaminationConfig())
    assert found.removed["task_id"].to_list() == [again.task_id] and found.kept == (mish.task_id,)
