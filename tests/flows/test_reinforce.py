"""`concur reinforce`: which adapter, and verdicts of real workers."""

import json
import sys

import httpx
import pytest

from flows import forms
from flows.config import PipelineConfig, load_profile
from flows.deployments import newest_adapter, reinforce_with_rewards
from flows.reinforce import judge_by, of_training, reinforce_adapter
from kernels_eval.errors import UsageError
from kernels_eval.records import Verdict
from tasks.sources import bundled
from tasks.store.snapshot import ADAPTER, Snapshot
from tasks.verification.stage import pool_of
from tests.support.commands import concur, run, tiny
from tests.support.commands import environment as variables
from tests.support.curated import line, sample
from tests.support.servers import prefect_server


def test_without_a_training_there_is_one_sentence(tmp_path):
    with pytest.raises(UsageError, match=r"holds no finished training \(run `concur train` first"):
        of_training(PipelineConfig(root=str(tmp_path)), None)
    said = concur("reinforce", "--root", str(tmp_path / "none"))
    assert said.returncode == 2 and "holds no finished training" in said.stderr
    assert "Warning" not in said.stderr
    with pytest.raises(UsageError, match="holds no finished training"):
        reinforce_with_rewards.fn(run=forms.RunForm(root=str(tmp_path / "none")))
    assert not (tmp_path / "none").exists()


def adapted(curated, stage, name, base):
    extra = {"adapter": "adapter", "base_model": base}
    snapshot = Snapshot(curated.root, stage, name)
    snapshot.local_dir("adapter")
    (snapshot.local_dir() / ADAPTER).touch()
    return snapshot.publish(config={}, upstream=[curated.fingerprint], extra=extra).ref


def test_a_base_model_that_is_gone_is_told_before_any_worker_starts(tmp_path):
    import ray

    curated = line(tmp_path / "root", [sample("t/1", 0, 10, 6.0)])
    adapted(curated, "training", "f00d", base=str(tmp_path / "gone"))
    asked = PipelineConfig(root=curated.root, reinforcement={"tasks_per_step": 1})
    config, tasks, trained = of_training(asked, None)
    with pytest.raises(UsageError, match="model directory .*gone does not exist"):
        reinforce_adapter(config, tasks, trained)
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
    profile = tiny(
        "tiny",
        tasks=2,
        training={"num_epochs": 1},
        benchmark=once,
        reinforcement=ONE_STEP | {"max_tokens": 16},
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
    assert "snapshots" in shown

    (folder,) = (root / "reinforcement").glob("*")
    snapshot = Snapshot(str(root), "reinforcement", folder.name)
    assert snapshot.manifest["config"]["reward"] == "kevin"
    client = mlflow.tracking.MlflowClient(f"sqlite:///{root}/mlflow.db")
    (experiment,) = (each for each in client.search_experiments() if each.name == "concur")
    runs = client.search_runs([experiment.experiment_id], f"tags.fingerprint = '{folder.name}'")
    names = set(runs[0].data.metrics)
    # no kernel of this model is correct: it has no speedup
    assert {"reward", "status/correct", "status/rejected", "kl", "judged_s"} <= names
    assert {"reasoning_tokens", "rejected/no_custom_kernel", "reward/correct"} <= names
    assert len(client.get_metric_history(runs[0].info.run_id, "status/no_code")) == 2


CODE = "import torch\nclass ModelNew(torch.nn.Module):\n    pass  # {}\n"


def fenced(code):
    return f"```python\n{code}```" if code else "none"


@pytest.mark.parametrize("once", [False, True])
def test_the_same_code_for_a_task_is_judged_once(once):
    config = load_profile("local", [f"verification.once_per_code={json.dumps(once)}"])
    tasks = {task.task_id: task for task in bundled.load("train")[:2]}
    verified = []

    def verify(pairs):
        for task, candidate in pairs:
            verified.append((task.task_id, candidate.code))
            names = {"candidate_id": candidate.candidate_id, "task_id": task.task_id}
            yield Verdict(**names, language="cpp", status="correct", reason="ok")

    judge = judge_by(verify, config, tasks)
    one, two = tasks
    same, other = fenced(CODE.format(1)), fenced(CODE.format(2))
    judged = judge([one, two, one, one, two, one], [same, same, other, same, "none", same])
    verdicts = [each.verdict for each in judged]
    assert len(verified) == len(set(verified)) == 3
    assert verdicts[0] is verdicts[3] is verdicts[5] and verdicts[4].status == "no_code"
    assert [verdict.task_id for verdict in verdicts[:3]] == [one, two, one]

    assert all(each.verdict for each in judge([one, two], [same, other]))
    assert len(verified) == (4 if once else 5)


def test_an_answer_that_no_worker_could_judge_has_no_verdict():
    (task,) = bundled.load("train")[:1]
    judge = judge_by(lambda pairs: [], load_profile("local"), {task.task_id: task})
    (judged,) = judge([task.task_id], ["<think>a thought</think>" + fenced(CODE)])
    assert judged == (None, "a thought", "")


@pytest.mark.slow
def test_workers_judge_answers():
    import ray

    config = load_profile("local", ["verification.workers=1", "verification.builders=1"])
    tasks = {task.task_id: task for task in bundled.load("train")[:2]}
    texts = [text for task in tasks.values() for text in bundled.responses(task.name, "cpp")[:2]]
    names = [name for name in tasks for _ in range(2)]
    with pool_of(config.language, config.verification) as pool:
        judge = judge_by(pool.verify, config, tasks)
        judged = judge([*names, names[0]], [*texts, "I give up."])
    ray.shutdown()
    verdicts = [each.verdict for each in judged]
    assert [verdict.task_id for verdict in verdicts] == [*names, names[0]]
    assert verdicts[4].status == "no_code"
    assert any(verdict.status == "correct" for verdict in verdicts)
