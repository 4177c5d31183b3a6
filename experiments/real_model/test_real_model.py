"""The tables are tasks that the line reads, and held-out operators are not trained on."""

import json
from pathlib import Path

import polars as pl
import pytest
import torch

from experiments.real_model import rounds, tables
from experiments.real_model.results import Scored, write_results
from flows.config import PipelineConfig, load_profile
from kernels_eval.errors import UsageError
from tasks.benchmark.stage import Answers
from tasks.decontamination.config import DecontaminationConfig
from tasks.decontamination.decontamination import decontaminate
from tasks.sources import stage as sources
from tasks.sources.config import TasksConfig
from tasks.sources.stage import load_tasks
from tasks.store import Snapshot
from tasks.synthesis import stage as synthesis
from tasks.tables import CANDIDATES, TASKS, VERDICTS
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


def test_the_teachers_answers_are_those_of_the_first_round(tmp_path):
    tables.write("cpp", tmp_path)
    profile = str(Path(rounds.__file__).with_name("profile.yaml"))
    config = load_profile(profile, ["training.base_model=small"])
    line = rounds.taught_by(config, str(tmp_path / "taught.jsonl"))
    source = TasksConfig(source="files", location=str(tmp_path / "train.jsonl"), limit=60)
    tasks = sources.run(source, str(tmp_path))
    rows = synthesis.run(tasks, line.synthesis, line.language).open().read()
    programs = {task.task_id for task in load_tasks(source) if task.source != "module"}
    assert set(rows["task_id"]) == programs and rows.height == len(tables.STYLES) * len(programs)
    assert rows["code"].null_count() == 0 and set(rows["reasoning_tokens"]) == {0}
    assert rounds.asked_from(config, None).synthesis.sampler == "transformers"


def test_the_profile_asks_the_model_that_it_trains():
    config = load_profile(str(Path(rounds.__file__).with_name("profile.yaml")))
    assert config.synthesis.model == config.training.base_model
    assert "recorded" not in config.benchmark.models  # nobody recorded answers to these tasks


def test_strategies_have_lengths_to_choose_by(tmp_path):
    profile = str(Path(rounds.__file__).with_name("strategies.yaml"))
    config = load_profile(profile, ["training.base_model=small", "synthesis.tokenizer=small"])
    tasks = sources.run(config.tasks.model_copy(update={"limit": 20}), str(tmp_path))
    rows = synthesis.run(tasks, config.synthesis, config.language).open().read()
    lengths = rows.group_by("task_id").agg(pl.col("reasoning_tokens").n_unique())
    assert lengths.height == 20 and rows["reasoning_tokens"].min() > 0
    assert lengths["reasoning_tokens"].mean() > 2 and rows["code"].null_count() == 0


def test_a_training_task_that_is_a_held_out_operator_is_found():
    def frame(*tasks):
        return annotate(pl.DataFrame([task.model_dump() for task in tasks]))

    relu, mish = WRITTEN["published/19_relu"], WRITTEN["module/Mish"]
    again = relu.model_copy(update={"task_id": "train/relu", "code": f"{relu.code}\n# again\n"})
    found = decontaminate(frame(again, mish), frame(relu), DecontaminationConfig())
    assert found.removed["task_id"].to_list() == [again.task_id] and found.kept == (mish.task_id,)


def scored(root, name, correct, level="confirm", **more):
    """A model that solves the first `correct` of four tasks, two of each level."""

    def kept(stage, rows, schema, of=name):
        snapshot = Snapshot(str(root), stage, of)
        if not snapshot.finished:
            snapshot.append(rows, schema)
            snapshot.publish(config={}, rows=len(rows))
        return snapshot.ref

    levels = {"published/1_a": 1, "published/2_b": 1, "generated/c": 2, "generated/d": 2}
    suite = [{"task_id": task, "level": level} for task, level in levels.items()]
    answers, verdicts = [], []
    for place, task in enumerate(levels):
        for index in range(2):
            own = {"candidate_id": f"{name} {task} {index}", "task_id": task}
            answers.append(own | {"sample_index": index, "response": f"<{name}> writes {task}"})
            right = place < correct
            status, reason = ("correct", "ok") if right else ("rejected", "no_custom_kernel")
            verdicts.append(own | {"status": status, "reason": reason, "outputs_match": right})
            verdicts[-1] |= {"timing": {"speedup": 2.0} if right else None, "level": level}
    candidates = kept("synthesis", answers, CANDIDATES)
    judged = kept("verification", verdicts, VERDICTS)
    made = Answers(model=name, candidates=candidates, verdicts=judged)
    return Scored(name=name, suite=kept("tasks", suite, TASKS, "suite"), answers=made, **more)


def test_results_compare_each_round_with_the_ones_before(tmp_path):
    base = scored(tmp_path, "base", 1, seconds={"score": 12.4}, gpus=2)
    tuned = scored(tmp_path, "round 1", 3)
    kept = {"verdicts": tuned.answers.verdicts, "curated": tuned.answers.candidates}
    tuned = tuned.model_copy(update={"samples": kept})
    config = PipelineConfig(benchmark={"samples_per_task": 2})
    write_results([base], config, tmp_path / "out")
    write_results([base, tuned], config, tmp_path / "out")
    text = (tmp_path / "out/results.md").read_text()
    for line in (
        "| base | 2 | 4 | 50.0 %",  # of the published operators
        "| round 1 | 2 | 4 | 100.0 %",
        "| base | 2 | 4 | 0.0 %",  # of the generated programs
        "| round 1 minus base | Exec@2 |",
        "| rejected | no_custom_kernel | 6 | 2 |",
        "| score | 12 s, 25 |",
        "| round 1 | 4 | 8 | 6 | 3 | 8 |",
    ):
        assert line in text, text
    answers = (tmp_path / "out/answers.md").read_text()
    assert "base: rejected no_custom_kernel" in answers and "<round 1> writes" in answers
    rows = json.loads((tmp_path / "out/rounds.json").read_text())
    assert [Scored.model_validate(row) for row in rows] == [base, tuned]


def test_right_answers_that_were_only_screened_have_no_scores(tmp_path):
    base, tuned = scored(tmp_path, "base", 0, "screen"), scored(tmp_path, "round 1", 3, "screen")
    write_results([base], PipelineConfig(), tmp_path / "out")
    with pytest.raises(UsageError, match="6 right answers of round 1 were only screened"):
        write_results([base, tuned], PipelineConfig(), tmp_path / "out")


def test_a_clock_counts_from_one_stage_to_the_next(monkeypatch):
    now = iter([0.0, 5.0, 7.0, 10.0, 11.0])
    monkeypatch.setattr(rounds.time, "monotonic", lambda: next(now))
    clock = rounds.Clock()
    clock("sample", 0, 0, "begins")
    clock("sample", 1, 4, "")
    clock("train", 0, 0, "begins")
    assert clock.taken() == {"start": 5.0, "sample": 2.0, "train": 3.0}
    assert clock.taken() == {"results": 1.0}
