"""The policy in training on a server: each call answers with the adapter of that call. The real
vLLM is in test_vllm.py."""

from pathlib import Path

import pytest

from kernels_eval.errors import EvalError, UsageError
from tasks.synthesis.served_policy import ServedPolicy
from tests.support.chat_server import serving
from tests.support.requests import make_request, without_proxies


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    without_proxies(monkeypatch)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-policy")


class Policy:
    """What of a PEFT model is used."""

    def save_pretrained(self, place, selected_adapters):
        Path(place).mkdir(parents=True)
        (Path(place) / "adapter_config.json").write_text(str(selected_adapters))


def requests(count):
    return [make_request(n, max_tokens=8, temperature=1.0) for n in range(count)]


PROMPTS = {"0": [5, 6], "1": [5, 7]}


def echo(number, body):
    if "prompt" not in body:
        return 200, {"status": "success"}
    choice = {"text": "?", "token_ids": [*body["prompt"], 9], "finish_reason": "stop"}
    return 200, {"choices": [choice]}


def test_each_call_answers_with_its_own_adapter_and_forgets_the_last(tmp_path):
    with serving(echo) as server:
        policy = ServedPolicy([server.url + "/"], tmp_path)
        for _ in range(2):
            found = {each.request_key: each.tokens for each in policy.write(*given())}
            assert found == {"0": (5, 6, 9), "1": (5, 7, 9)}
        held = policy.model
        assert [each.name for each in tmp_path.iterdir()] == [held]
        policy.close()
    assert not list(tmp_path.iterdir()) and policy.model == ""
    paths = [body["path"].rpartition("/")[2] for body in server.bodies]
    asked = ["completions", "completions"]
    assert paths == [
        *("load_lora_adapter", *asked, "unload_lora_adapter"),
        *("load_lora_adapter", *asked, "unload_lora_adapter"),
    ]
    loads = [body for body in server.bodies if "lora_path" in body]
    first, second = (each["lora_name"] for each in loads)
    assert first != second == held and loads[1]["lora_path"] == str(tmp_path / second)
    assert [body["model"] for body in server.bodies if "prompt" in body] == [first] * 2 + [
        second
    ] * 2
    sent = server.bodies[1]
    assert sent["return_token_ids"] is True and sent["max_tokens"] == 8 and "seed" not in sent
    # the model's own settings would be another policy
    assert (sent["top_k"], sent["min_p"], sent["repetition_penalty"]) == (0, 0.0, 1.0)
    assert all(each["authorization"] == "Bearer sk-policy" for each in server.headers)


def given():
    return Policy(), requests(2), PROMPTS


def test_a_server_that_takes_no_adapters_is_told_how_to_start(tmp_path):
    with (
        serving(lambda *_: (404, {"detail": "Not Found"})) as server,
        pytest.raises(
            UsageError, match=r"did not take load_lora_adapter \(HTTP 404\).*RUNTIME_LORA"
        ),
    ):
        next(ServedPolicy([server.url], tmp_path).write(*given()))


def test_a_server_that_is_gone_is_no_fault_of_the_policy(tmp_path):
    with serving(echo) as server:
        pass
    with pytest.raises(EvalError, match="does not answer.*reinforcement.base_url"):
        next(ServedPolicy([server.url], tmp_path).write(*given()))


def test_an_answer_that_is_refused_ends_the_step(tmp_path):
    def refuse_one(number, body):
        return (400, {"error": "too long"}) if body.get("prompt") == [5, 7] else echo(number, body)

    with serving(refuse_one) as server, pytest.raises(EvalError, match="left 1 of 2 answers"):
        list(ServedPolicy([server.url], tmp_path).write(*given()))


def test_a_server_that_was_started_again_has_nothing_to_forget(tmp_path):
    def forgetful(number, body):
        known = "lora_path" in body or "prompt" in body
        return echo(number, body) if known else (404, {"error": "no such adapter"})

    with serving(forgetful) as server:
        policy = ServedPolicy([server.url], tmp_path)
        for _ in range(2):
            assert len(list(policy.write(*given()))) == 2
        policy.close()
