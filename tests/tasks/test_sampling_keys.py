"""A setting that is not sent is no part of a key: what has been asked is not asked again."""

import pytest

from kernels_eval.records import KernelTask, Language, SamplingParams, candidate_id
from tasks.sources.stage import keep, read_tasks
from tasks.synthesis import requests as requests_module
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.requests import Questions, first_requests
from tests.support.cases import cases
from tests.support.requests import named_sampler

CASES = cases("sampling_keys")

TASK = KernelTask(task_id="t/0", name="t0", code="# 0")
LATER = CASES["later"]


@pytest.fixture
def tasks(tmp_path):
    return keep([TASK], str(tmp_path), {})


def config(sampling, samples=2):
    return SynthesisConfig(
        sampler="openai",
        model="m",
        base_url="http://127.0.0.1:1/v1",
        samples_per_task=samples,
        sampling=sampling,
    )


def request_keys(tasks, sampling):
    return tuple(
        first_requests(
            Questions(read_tasks(tasks), config(sampling), Language.CUDA, named_sampler())
        ).keys
    )


def test_a_candidate_keeps_its_identity_and_a_setting_that_is_sent_gives_another():
    for identity, case in CASES["candidate_ids"].items():
        # without and with the later settings, which Parquet reads as unset
        for sampling in (case["sampling"], case["sampling"] | CASES["unset"]):
            found = candidate_id(TASK, "g", SamplingParams(**sampling), case["index"], "text")
            assert found == identity
    identities = {
        candidate_id(TASK, "g", SamplingParams(**later), 0, "text") for later in [{}, *LATER]
    }
    assert len(identities) == 1 + len(LATER), "0 is sent too: a server may have other defaults"


def test_a_request_keeps_its_key_and_a_setting_that_is_sent_gives_another(tasks, monkeypatch):
    monkeypatch.setattr(
        requests_module, "render", lambda *arguments, **named: "a prompt"
    )  # the keys are not about what prompts say
    for case in CASES["request_keys"]:
        for sampling in (case["sampling"], case["sampling"] | {"top_k": None}):
            assert list(request_keys(tasks, SamplingParams(**sampling))) == case["keys"]
    found = [key for later in [{}, *LATER] for key in request_keys(tasks, SamplingParams(**later))]
    assert len(set(found)) == len(found)
