"""Reasoning of a model that concur serves is counted with that model's own tokenizer, without
anybody saying so, and without a network."""

import logging
import shutil
import sys

import pytest

from kernels_eval.errors import UsageError
from kernels_eval.records import Language
from tasks.models import count_tokens
from tasks.sources.small_model import SmallModelConfig, build_small_model
from tasks.synthesis.config import ServerConfig, SynthesisConfig
from tasks.synthesis.sampler import Response
from tasks.synthesis.samplers import make_sampler
from tasks.synthesis.server import VllmSampler, served_tokenizer
from tasks.synthesis.stage import Synthesis
from tests.support.chat_server import completion, serving
from tests.support.requests import tasks_snapshot

TEXTS = ["", "think of tiles", "think of tiles " * 50]
SERVER = ServerConfig(command=sys.executable)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models whose tokenizers count differently."""
    root = tmp_path_factory.mktemp("models")
    config = SmallModelConfig(vocab_size=512)
    return {
        "tiles": build_small_model(root / "tiles", ["think of tiles and of tiles " * 20], config),
        "other": build_small_model(root / "other", ["0123456789 abcdef ghijkl"], config),
    }


@pytest.fixture
def cached(models, tmp_path, monkeypatch):
    """A hub cache that holds a snapshot of org/tiles, and nothing else to ask."""
    place = tmp_path / "hub" / "models--org--tiles"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("abc123")
    shutil.copytree(models["tiles"], place / "snapshots" / "abc123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return place / "snapshots" / "abc123"


def config(model, **changes):
    return SynthesisConfig(
        **(
            {"sampler": "vllm", "model": str(model), "server": SERVER, "samples_per_task": 2}
            | changes
        )
    )


def test_the_two_count_differently(models):
    assert count_tokens(models["tiles"], TEXTS) != count_tokens(models["other"], TEXTS)


def test_a_model_directory_is_counted_with_its_own_tokenizer(models, tmp_path):
    assert make_sampler(config(models["tiles"]), str(tmp_path)).count_tokens(TEXTS) == count_tokens(
        models["tiles"], TEXTS
    )


def test_a_hub_id_is_counted_with_its_snapshot_on_this_machine(cached, models, tmp_path):
    assert served_tokenizer("org/tiles") == cached
    assert make_sampler(config("org/tiles"), str(tmp_path)).count_tokens(TEXTS) == count_tokens(
        models["tiles"], TEXTS
    )


def test_a_snapshot_that_the_server_fetches_is_found_when_it_is_there(cached, tmp_path):
    hidden = cached.rename(tmp_path / "not yet")
    sampler = make_sampler(config("org/tiles"), str(tmp_path))
    assert sampler.count_tokens(TEXTS) is None
    hidden.rename(cached)
    assert sampler.count_tokens(TEXTS) is not None


def test_the_one_that_is_configured_wins(models, tmp_path):
    sampler = make_sampler(config(models["tiles"], tokenizer=str(models["other"])), str(tmp_path))
    assert sampler.count_tokens(TEXTS) == count_tokens(models["other"], TEXTS)


@pytest.mark.parametrize("model", ["directory", "org/absent"])
def test_without_one_nothing_is_counted_and_one_warning_says_so(
    model, cached, models, tmp_path, caplog
):
    if model == "directory":  # weights, and a config.json that names no tokenizer
        shutil.copytree(
            models["tiles"], tmp_path / "bare", ignore=shutil.ignore_patterns("*token*")
        )
        model = str(tmp_path / "bare")
        assert (tmp_path / "bare" / "config.json").is_file()
    sampler = make_sampler(config(model), str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert sampler.count_tokens(TEXTS) is None and sampler.count_tokens(TEXTS) is None
    assert caplog.text.count("synthesis.tokenizer") == 1 and model in caplog.text


def test_candidates_of_a_served_model_have_their_reasoning_counted(models, tmp_path, monkeypatch):
    def canned(self, requests):
        for request in requests:
            thoughts = "think of tiles " * (1 + request.sample_index)
            yield Response(
                request_key=request.request_key,
                text="An answer.",
                reasoning=thoughts,
                finish_reason="stop",
            )

    monkeypatch.setattr(VllmSampler, "sample", canned)
    frame = (
        Synthesis(tasks_snapshot(tmp_path), config(models["tiles"]), Language.CPP)
        .run()
        .open()
        .read(unique="candidate_id")
        .sort("sample_index")
    )
    assert frame["reasoning_tokens"].to_list() == count_tokens(
        models["tiles"], frame["reasoning"].to_list()
    )
    assert 0 < frame["reasoning_tokens"][0] < frame["reasoning_tokens"][1]


def test_a_tokenizer_is_loaded_before_anything_is_asked_for(tmp_path):
    """Answers would wait for it, and be lost where the run is stopped meanwhile; one that cannot be
    loaded would cost them all."""
    (tmp_path / "none").mkdir()
    with serving(lambda number, body: (200, completion("An answer."))) as server:
        asked = config("m", sampler="openai", base_url=server.url, tokenizer=str(tmp_path / "none"))
        with pytest.raises(UsageError, match="tokenizer"):
            Synthesis(tasks_snapshot(tmp_path), asked, Language.CPP).run()
        assert server.bodies == []


def test_an_endpoint_may_count_the_reasoning_itself(tmp_path):
    body = completion("An answer.", reasoning="think of tiles")
    body["usage"]["completion_tokens_details"] = {"reasoning_tokens": 3}
    with serving(lambda number, _: (200, body)) as server:
        asked = config("m", sampler="openai", base_url=server.url, tokenizer="usage")
        rows = Synthesis(tasks_snapshot(tmp_path), asked, Language.CPP).run().open().read()
    assert rows["reasoning_tokens"].to_list() == [3, 3]
