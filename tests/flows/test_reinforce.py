"""`concur reinforce`: which adapter, and verdicts of real workers while answers are written."""

from __future__ import annotations

import pytest

from flows.config import PipelineConfig, load_profile
from flows.reinforce import environment, of_training
from kernels_eval.errors import UsageError
from tasks.sources import bundled
from tasks.synthesis.prompts import render
from tests.support.commands import concur


def test_without_a_training_there_is_one_sentence(tmp_path):
    with pytest.raises(UsageError, match=r"holds no finished training \(run `concur train` first"):
        of_training(PipelineConfig(root=str(tmp_path)), None)
    said = concur("reinforce", "--root", str(tmp_path / "none"))
    assert said.returncode == 2 and "holds no finished training" in said.stderr


@pytest.mark.slow
def test_workers_judge_answers_while_others_are_written(tmp_path):
    import ray

    from tasks.training.grpo import Answer, Asked

    config = load_profile("local", ["verification.workers=1", "verification.builders=1"])
    tasks = {task.task_id: task for task in bundled.load("train")[:2]}
    prompts = {name: render(task, config.language) for name, task in tasks.items()}
    texts = [text for task in tasks.values() for text in bundled.responses(task.name, "cpp")[:2]]
    names = [name for name in tasks for _ in range(2)]
    texts.append("I give up.")
    names.append(names[0])

    def arriving():
        for place, (name, text) in enumerate(zip(names, texts, strict=True)):
            yield from (None, None)  # nothing has ended so far
            yield Answer(Asked(place, name, [1], 0), text, [1])

    with environment(config, tasks, prompts) as made:
        verdicts = dict(made.judge(arriving()))
    ray.shutdown()
    assert sorted(verdicts) == list(range(5)) and not made.apart
    assert verdicts[4].status == "no_code"
    assert {verdicts[place].task_id for place in range(4)} == set(tasks)
    assert any(verdict.status == "correct" for verdict in verdicts.values())
