"""Adapters give their trainers the rewards of the recipe, and never a number for a fault.

That for verifiers runs against it where it is installed, else against its protocol
(tests.support.trainer_protocols).
"""

import asyncio
import importlib
import json
import sys
from types import SimpleNamespace

import pytest

from kernels_eval.errors import UsageError
from kernels_eval.rewards import recipe_of
from kernels_eval.service.adapters.scoring import (
    NoRewardError,
    Scorer,
    cacheable,
    shared_scorer,
    text_of,
)
from tests.support.recorded_service import recorded_service
from tests.support.trainer_protocols import provide_verifiers

ROW = {"task_id": "level1/1", "prompt": "Write a kernel."}
KEVIN = {"fast": 2.3, "slow": 0.8, "wrong": 0.0, "cheat": 0.0, "broken": None, "fault": None}
FAULTS = ("broken", "fault")
ADAPTERS = "kernels_eval.service.adapters"


@pytest.fixture(scope="module")
def running():
    with recorded_service() as service:
        yield service


@pytest.fixture
def service(running, monkeypatch):
    running.requests.clear()
    monkeypatch.setenv("CONCUR_SERVE_URL", running.url)
    shared_scorer.cache_clear()
    return running


@pytest.fixture
def adapter(service, monkeypatch):
    """Import an adapter."""

    def load(name):
        if name == "verifiers":
            provide_verifiers(monkeypatch)
        dotted = f"{ADAPTERS}.{name}"
        monkeypatch.delitem(sys.modules, dotted, raising=False)
        module = importlib.import_module(dotted)
        monkeypatch.setitem(sys.modules, dotted, module)  # forgotten with the protocol
        return module

    return load


def scored(scorer, rows, responses):
    return asyncio.run(scorer.scores(rows, responses))


# -- what they share -------------------------------------------------------------------------------


def test_scores_are_the_recipes_and_faults_have_none(service):
    scorer = Scorer("kevin")
    rows = [ROW] * len(KEVIN)
    scores = scored(scorer, rows, list(KEVIN))
    assert [score.reward for score in scores] == pytest.approx(list(KEVIN.values()))
    for word, score in zip(KEVIN, scores, strict=True):
        if word in FAULTS:
            with pytest.raises(NoRewardError, match="recorded" if word == "broken" else "GPU"):
                score.earned()
        else:
            assert score.earned() == score.reward


def test_a_scorer_serves_one_event_loop_after_the_other(service):
    scorer = Scorer("kevin")
    for _ in range(2):
        assert asyncio.run(scorer.score(ROW, "fast")).reward == pytest.approx(2.3)


def test_a_row_becomes_a_request_and_keeps_what_is_not_its_own(service):
    row = {"task": "class Model: ...", "task_id": None, "language": "cpp", "answer": 1}
    scored(Scorer("kevin"), [{**row, "deadline_s": 9, "priority": 2}], ["fast"])
    (request,) = service.requests
    assert (request.task.code, request.task_id) == ("class Model: ...", None)
    assert (request.language, request.deadline_s, request.priority) == ("cpp", 9, 2)
    assert request.response == "fast"


@pytest.mark.parametrize(
    "row", [{}, {"prompt": "x"}, {"task_id": "a", "task": "b"}, {"task_id": 3}]
)
def test_a_row_without_one_task_is_refused_before_it_is_sent(service, row):
    with pytest.raises(UsageError, match="is no request") as refused:
        scored(Scorer("kevin"), [row], ["fast"])
    assert "task_id" in refused.value.hint
    assert not service.requests


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "fast"])
def test_a_least_time_that_is_none_is_refused_before_it_is_sent(service, value):
    with pytest.raises(UsageError, match="is no request: least_ms: "):
        scored(Scorer("concur"), [{**ROW, "least_ms": value}], ["fast"])
    assert not service.requests


def test_columns_of_a_data_set_s_own_are_left_alone(service):
    """Data sets have columns that a request has fields for, with another meaning."""
    own = dict.fromkeys(("solution", "code", "response", "id", "prompt", "answer"), "its own")
    assert scored(Scorer("kevin"), [ROW | own], ["fast"])[0].reward == pytest.approx(2.3)


def test_what_the_service_refuses_is_an_error_and_no_reward(service):
    with pytest.raises(UsageError, match="unknown"):
        scored(Scorer("kevin"), [{"task_id": "unknown"}], ["fast"])


def test_the_roofline_of_a_row_counts(service):
    scorer = Scorer("concur")
    plain, known = scored(scorer, [ROW, {**ROW, "least_ms": 0.25}], ["fast", "fast"])
    assert known.reward == pytest.approx(plain.reward + 0.25)


@pytest.mark.parametrize(
    "response, text",
    [
        ("a", "a"),
        ([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "a"),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}]}], "a"),
        ([{"role": "assistant", "content": None}], ""),
        ([SimpleNamespace(role="assistant", content="a")], "a"),
        ([], ""),
    ],
)
def test_the_text_of_a_response(response, text):
    assert text_of(response) == text


# -- TRL -------------------------------------------------------------------------------------------


def call(reward, words, **columns):
    """As trl 1.16 calls a reward function (`GRPOTrainer._calculate_rewards`)."""
    logged = {}
    given = reward(
        prompts=["p"] * len(words),
        completions=[[{"role": "assistant", "content": word}] for word in words],
        completion_ids=[[1]] * len(words),
        trainer_state=None,
        log_extra=lambda *_: None,
        log_metric=logged.__setitem__,
        **columns,
    )
    return asyncio.run(given), logged


def test_trl_gets_one_reward_a_completion_and_none_for_a_fault(adapter):
    reward = adapter("trl").KernelReward(Scorer("kevin"))
    words = list(KEVIN)
    columns = {"task_id": ["level1/1"] * len(words), "other": list(range(len(words)))}
    rewards, logged = call(reward, words, **columns)
    assert rewards == pytest.approx(list(KEVIN.values()))
    assert logged == pytest.approx({"correct": 2 / 6, "rejected": 1 / 6, "speedup": 2.5 / 6})


# -- verl ------------------------------------------------------------------------------------------


def verl_score(compute, word, recipe="concur", **extra):
    return asyncio.run(
        compute(
            data_source="kernels",
            solution_str=word,
            ground_truth="level1/1",
            extra_info={"num_turns": 1, "rollout_reward_scores": {}, **extra},
            recipe=recipe,
        )
    )


def test_verl_scores_and_logs(adapter, service):
    compute = adapter("verl").compute_score
    assert verl_score(compute, "fast") == {
        **{"score": 2.0, "acc": 1.0, "correct": 1.0, "rejected": 0.0, "speedup": 2.0}
    } | {"score": pytest.approx(1.5)}
    assert verl_score(compute, "cheat", task_id="level1/2")["score"] == -1.0
    assert [request.task_id for request in service.requests] == ["level1/1", "level1/2"]
    for word in FAULTS:
        with pytest.raises(NoRewardError):
            verl_score(compute, word)


RECIPE = {"name": "concur", "penalties": {"no_custom_kernel": 3.0}}


def test_a_recipe_of_a_configuration_is_one_scorer(adapter):
    """Trainers hand the mapping of their configuration over, for every sample."""
    compute = adapter("verl").compute_score
    assert [verl_score(compute, "cheat", recipe=RECIPE)["score"] for _ in range(2)] == [-3.0, -3.0]
    assert shared_scorer.cache_info().misses == 1


# -- verifiers -------------------------------------------------------------------------------------


def taskset(module, tmp_path, *lines):
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(lines))
    config = module.KernelTasksetConfig(path=path, task={"recipe": "kevin"})
    return module.KernelTaskset(config)


class FakeTrace(SimpleNamespace):
    """What a task's reward uses of a trace."""

    def record_metrics(self, values):
        self.metrics |= values

    def record_reward(self, name, value, weight=1.0):
        self.rewards[name] = SimpleNamespace(score=float(value))


def trace_of(module, reply):
    """A trace of verifiers' own where it is installed."""
    if hasattr(module.vf.Trace, "model_construct"):
        return module.vf.Trace.model_construct(root_reply=reply, rewards={}, metrics={})
    return FakeTrace(last_reply=reply, rewards={}, metrics={})


def test_verifiers_scores_the_last_reply(adapter, tmp_path):
    module = adapter("verifiers")
    (task,) = taskset(module, tmp_path, json.dumps(ROW))
    assert (task.data.prompt, task.data.id) == ("Write a kernel.", "level1/1")
    trace = trace_of(module, "fast")
    asyncio.run(task.score(trace))
    assert sum(each.score for each in trace.rewards.values()) == pytest.approx(2.3)
    assert trace.metrics["speedup"] == 2.0
    for word in FAULTS:
        trace = trace_of(module, word)
        with pytest.raises(Exception, match="no reward"):
            asyncio.run(task.score(trace))
        assert not any(trace.rewards.values())


@pytest.mark.parametrize("line", ['{"task_id": "a"}', "[1]", "{", "null"])
def test_verifiers_names_the_bad_line(adapter, tmp_path, line):
    module = adapter("verifiers")
    with pytest.raises(UsageError, match=r"tasks\.jsonl, line 2"):
        list(taskset(module, tmp_path, json.dumps(ROW), line))


@pytest.mark.slow
def test_real_kernels_earn_rewards_of_the_real_service(tmp_path):
    """`concur serve` judges; the client waits for it to be there."""
    from tests.support import kernels
    from tests.support.servers import free_port
    from tests.support.services import serving

    port = free_port()
    with serving(tmp_path, port):
        module = importlib.import_module(f"{ADAPTERS}.trl")
        reward = module.KernelReward(Scorer("kevin", f"http://127.0.0.1:{port}"))
        answers = [
            f"```python\n{kernels.module(body)}\n```"
            for body in ("return ext.affine(x)", "return ext.affine(x) + 1", "return x * 2 + 1")
        ]
        tasks = [kernels.AFFINE.code] * 3 + ["class Model: pass"]
        columns = {"task": tasks, "language": ["cpp"] * 4}
        given = reward(completions=[*answers, answers[0]], **columns)
        right, wrong, cheat, no_task = asyncio.run(given)
    assert right > 0.3
    assert (wrong, cheat, no_task) == (0.0, 0.0, None)


def test_a_recipe_of_a_configuration_is_a_key_and_a_file_is_not_read_for_each_sample(tmp_path):
    """Trainers ask for the scorer of a configuration once a sample."""
    mapping = {"name": "kernelbench_tinker", "baseline": 0.5}
    assert hash(cacheable(mapping)) == hash(cacheable(mapping))
    assert cacheable(mapping) == cacheable(mapping) == recipe_of(mapping)
    file = str(tmp_path / "recipe.yaml")  # there is none to read
    assert cacheable(file) == file
