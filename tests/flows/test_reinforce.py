"""`concur reinforce`: which adapter, and verdicts of real workers while answers are written."""

import json
import sys

import httpx
import pytest

from flows import forms
from flows.config import PipelineConfig, load_profile
from flows.deployments import REWARDS, newest_adapter, reinforce_with_rewards
from flows.reinforce import of_training, reinforce_adapter
from flows.rollouts import environment, environment_of
from kernels_eval.errors import UsageError
from kernels_eval.records import Verdict
from tasks.progress import gathering
from tasks.sources import bundled
from tasks.sources.small_model import load_causal_model, load_tokenizer
from tasks.store.snapshot import Snapshot
from tasks.synthesis.prompts import render
from tests.support.commands import concur, run, tiny
from tests.support.commands import environment as variables
from tests.support.curated import line, sample
from tests.support.servers import prefect_server
from tests.support.training import tiny_model


def test_without_a_training_there_is_one_sentence(tmp_path):
    with pytest.raises(UsageError, match=r"holds no finished training \(run `concur train` first"):
        of_training(PipelineConfig(root=str(tmp_path)), None)
    said = concur("reinforce", "--root", str(tmp_path / "none"))
    assert said.returncode == 2 and "holds no finished training" in said.stderr
    with pytest.raises(UsageError, match="holds no finished training"):
        reinforce_with_rewards.fn(run=forms.RunForm(root=str(tmp_path / "none")))
    assert not (tmp_path / "none").exists()


def adapted(curated, stage, name, base):
    extra = {"adapter": "adapter", "base_model": base}
    snapshot = Snapshot(curated.root, stage, name)
    return snapshot.publish(config={}, upstream=[curated.fingerprint], extra=extra).ref


def test_a_base_model_that_is_gone_is_told_before_any_worker_starts(tmp_path):
    import ray

    curated = line(tmp_path / "root", [sample("t/1", 0, 10, 6.0)])
    adapted(curated, "training", "f00d", base=str(tmp_path / "gone"))
    config, tasks, trained = of_training(PipelineConfig(root=curated.root), None)
    with pytest.raises(UsageError, match="model directory .*gone does not exist"):
        reinforce_adapter.fn(config, tasks, trained)
    assert not ray.is_initialized()


def test_a_reinforced_adapter_is_scored_by_its_fingerprint(tmp_path):
    curated = line(tmp_path / "root", [sample("t/1", 0, 10, 6.0)])
    trained = adapted(curated, "training", "f00d", base="b")
    reinforced = adapted(trained, "reinforcement", "beef", base="b")
    config = PipelineConfig(root=curated.root)
    assert newest_adapter(config, "") == newest_adapter(config, "f00") == trained
    assert newest_adapter(config, "bee") == reinforced
    with pytest.raises(UsageError, match="of the stage curation, which has no adapter"):
        newest_adapter(config, curated.fingerprint)


ONE_STEP = {"steps": 1, "tasks_per_step": 1, "samples_per_task": 2, "batch_size": 2, "beta": 0.01}
DEPLOYED = """
from flows import forms
from flows.deployments import reinforce_with_rewards
asked = forms.ReinforcementForm(steps=2, reward="kevin")
reinforce_with_rewards(run=forms.RunForm(profile="tiny"), reinforcement=asked)
"""


@pytest.mark.slow
def test_the_deployed_flow_reinforces_the_newest_adapter_and_shows_what_a_person_needs(tmp_path):
    import mlflow

    root = tmp_path / "root"
    told = {"CONCUR_ROOT": str(root), "HF_HUB_OFFLINE": "1"}
    once = {"models": ["recorded"], "sampling": {"max_tokens": 16}}
    sampling = {"temperature": 1.0, "max_tokens": 16}
    profile = tiny(
        "tiny",
        tasks=2,
        training={"num_epochs": 1},
        benchmark=once,
        reinforcement=ONE_STEP | {"sampling": sampling},
    )
    (root / "profiles").mkdir(parents=True)
    file = root / "profiles" / "tiny.yaml"
    file.write_text(json.dumps(profile))
    whole = concur("run", "--profile", file, "--set", f"root={root}", **told)
    assert whole.returncode == 0, whole.stderr
    with prefect_server(tmp_path) as server:
        env = variables(**server.environment, **told)
        done = run([sys.executable, "-c", DEPLOYED], env)
        assert done.returncode == 0, done.stdout + done.stderr
        found = httpx.post(f"{server.api_url}/artifacts/filter", json={}, timeout=60).json()
    shown = {each["key"]: each["data"] for each in found}
    assert {"rewards", "snapshots"} <= set(shown)
    rows = json.loads(shown["rewards"])
    assert [row["step"] for row in rows] == [1, 2] and "reward" in rows[0]

    (folder,) = (root / "reinforcement").glob("*")
    snapshot = Snapshot(str(root), "reinforcement", folder.name)
    assert snapshot.manifest["config"]["reward"]["name"] == "kevin"
    client = mlflow.tracking.MlflowClient(f"sqlite:///{root}/mlflow.db")
    (experiment,) = (each for each in client.search_experiments() if each.name == "concur")
    runs = client.search_runs([experiment.experiment_id], f"tags.fingerprint = '{folder.name}'")
    names = set(runs[0].data.metrics)
    # no kernel of this model is correct: it has no speedup
    assert set(REWARDS) - {"speedup_of_correct"} <= names
    assert {"reasoning_tokens", "rejected/no_custom_kernel", "reward/correct"} <= names
    assert len(client.get_metric_history(runs[0].info.run_id, "status/no_code")) == 2


def answers(*told):
    """Answers of a policy, by task and code."""
    from tasks.training.grpo import Answer, Asked

    texts = [f"```python\n{code}```" if code else "none" for _, code in told]
    return [
        Answer(Asked(place, task, [1], 0), text, [1])
        for place, ((task, _), text) in enumerate(zip(told, texts, strict=True))
    ]


CODE = "import torch\nclass ModelNew(torch.nn.Module):\n    pass  # {}\n"


@pytest.mark.parametrize("once", [False, True])
def test_the_same_code_for_a_task_is_judged_once(once):
    config = load_profile("local", [f"verification.once_per_code={json.dumps(once)}"])
    tasks = {task.task_id: task for task in bundled.load("train")[:2]}
    judged = []

    def verify(pairs):
        for pair in pairs:
            if pair:
                task, candidate = pair
                judged.append((task.task_id, candidate.code))
                names = {"candidate_id": candidate.candidate_id, "task_id": task.task_id}
                yield Verdict(**names, language="cpp", status="correct", reason="ok")

    made = environment_of(config, tasks, {}, verify)
    one, two = tasks
    same, other = CODE.format(1), CODE.format(2)
    step = answers((one, same), (two, same), (one, other), (one, same), (two, ""), (one, same))
    verdicts = dict(made.judge([None, *step, None]))
    assert len(judged) == len(set(judged)) == 3 and sorted(verdicts) == list(range(6))
    assert verdicts[0] is verdicts[3] is verdicts[5] and verdicts[4].status == "no_code"
    assert [verdicts[place].task_id for place in (0, 1, 2)] == [one, two, one]

    again = dict(made.judge(answers((one, same), (two, other))))
    assert sorted(again) == [0, 1] and len(judged) == (4 if once else 5)


def test_rollouts_that_memory_does_not_hold_are_written_in_parts(tmp_path, monkeypatch):
    import torch

    from tasks.synthesis.local import Loaded
    from tasks.training.grpo import Asked

    directory = tiny_model(tmp_path / "small")
    model, tokenizer = load_causal_model(directory, dtype=torch.float32), load_tokenizer(directory)
    sampling = ["reinforcement.sampling.max_tokens=8", "language=cpp"]
    tasks = {task.task_id: task for task in bundled.load("train")[:2]}
    made = environment_of(load_profile("local", sampling), tasks, dict.fromkeys(tasks, "x"), iter)
    asked = [Asked(place, [*tasks][place % 2], [1, 2, 3], place) for place in range(7)]
    expected = {each.asked.place: each.tokens for each in made.write(model, tokenizer, asked)}
    respond, tried = Loaded.respond, []

    def limited(self, rows):
        tried.append(len(rows))
        yield from respond(self, rows[:1] if len(rows) > 2 else rows)
        if len(rows) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Loaded, "respond", limited)
    with gathering() as cautions:
        found = {each.asked.place: each.tokens for each in made.write(model, tokenizer, asked)}
    assert found == expected and len(found) == 7 and max(tried) == 7 and tried.count(7) == 1
    assert "Out of memory" in cautions[0]


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
