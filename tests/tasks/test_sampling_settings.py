"""Top-k, min-p and repetition penalty: what goes over the wire, and what they do where we draw
ourselves."""

import pytest
from pydantic import ValidationError

from kernels_eval.errors import UsageError
from kernels_eval.records import SamplingParams
from tasks.sources import bundled
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.recorded import RecordedSampler
from tasks.synthesis.samplers import make_sampler
from tests.support.cases import cases
from tests.support.chat_server import completion, serving
from tests.support.requests import MINE, make_request, without_proxies

CASES = cases("sampling_settings")

PLAIN = {"model", "messages", "temperature", "top_p", "max_tokens", "seed"}


class Endpoint:
    """Answers every request, or refuses those that hold one of `refused`, and keeps the bodies."""

    def __init__(self):
        self.url, self.bodies, self.refused = "", list[dict](), set[str]()

    def answer(self, _, body):
        self.bodies.append(body)
        wrong = self.refused & body.keys()
        return (
            (400, {"error": {"message": f"unknown field {min(wrong)}"}})
            if wrong
            else (200, completion("text"))
        )


@pytest.fixture
def endpoint(monkeypatch):
    without_proxies(monkeypatch)
    endpoint = Endpoint()
    with serving(endpoint.answer) as server:
        endpoint.url = server.url
        yield endpoint


def request(sampling, task=MINE, key="k"):
    return make_request(0, task, "p", key, **dict(sampling))


def ask(endpoint, tmp_path, **settings):
    config = SynthesisConfig.model_validate(
        {"sampler": "openai", "base_url": endpoint.url} | settings
    )
    return list(make_sampler(config, str(tmp_path)).sample([request(config.sampling)]))


# -- over the wire ---------------------------------------------------------------------------------


def test_a_body_holds_what_is_set_and_nothing_else(endpoint, tmp_path):
    ask(endpoint, tmp_path, model="m")
    ask(endpoint, tmp_path, model="m", sampling={"top_k": 0, "repetition_penalty": 1.05})
    ask(endpoint, tmp_path, model="Qwen/QwQ-32B")
    ask(endpoint, tmp_path, model="Qwen/QwQ-32B", sampling={"top_k": None, "min_p": None})
    plain, some, known, bare = endpoint.bodies
    assert plain.keys() == bare.keys() == PLAIN, (
        "an endpoint with OpenAI's settings alone is not troubled with others"
    )
    assert some.keys() == PLAIN | {"top_k", "repetition_penalty"} and (
        some["top_k"],
        some["repetition_penalty"],
    ) == (0, 1.05)
    assert known.keys() == PLAIN | {"top_k", "min_p"}
    assert {
        name: known[name] for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens")
    } == {"temperature": 0.6, "top_p": 0.95, "top_k": 40, "min_p": 0.0, "max_tokens": 32768}


def test_an_endpoint_that_knows_no_such_setting_says_so_and_we_say_what_to_do(endpoint, tmp_path):
    endpoint.refused = {"top_k"}
    with pytest.raises(UsageError, match="unknown field top_k") as caught:
        ask(endpoint, tmp_path, model="Qwen/QwQ-32B")
    assert "synthesis.sampling.top_k=null" in caught.value.hint
    assert (
        ask(endpoint, tmp_path, model="Qwen/QwQ-32B", sampling={"top_k": None})[0].text == "text"
    ), "and what we say helps"


@pytest.mark.parametrize("wrong", CASES["values_out_of_range_are_refused"])
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_recordings_do_not_look_at_settings():
    task = next(task for task in bundled.load() if task.name == "softmax_rows")
    given = [
        next(iter(RecordedSampler().sample([request(sampling, task)]))).text
        for sampling in (
            SamplingParams(),
            SamplingParams(top_k=1, min_p=1.0, repetition_penalty=2.0),
        )
    ]
    assert given == [bundled.responses("softmax_rows", "cpp")[0]] * 2


@pytest.mark.parametrize(
    "settings, passed",
    [
        ({"temperature": 0.0}, {"do_sample": False, "temperature": 1.0}),
        ({}, {"do_sample": True, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}),
        ({"top_k": 20, "min_p": 0.1, "top_p": 0.8}, {"top_k": 20, "min_p": 0.1, "top_p": 0.8}),
        ({"repetition_penalty": 1.2, "temperature": 0.6}, {"repetition_penalty": 1.2}),
    ],
)
def test_a_model_of_this_process_gets_every_setting(settings, passed):
    """All are named: transformers would take what is left open from the model's own defaults."""
    from tasks.synthesis.local import generate_settings

    found = generate_settings(SamplingParams(**settings))
    assert passed.items() <= found.items() and None not in found.values()
