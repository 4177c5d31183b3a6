"""Reasoning is counted with the served model's own tokenizer, another one, or by the endpoint."""

import sys

import pytest

from kernels_eval.errors import UsageError
from kernels_eval.records import Language
from tasks.models import count_tokens
from tasks.sources.small_model import SmallModelConfig, build_small_model
from tasks.synthesis.config import ServerConfig, SynthesisConfig
from tasks.synthesis.samplers import make_sampler
from tasks.synthesis.stage import Synthesis
from tests.support.chat_server import completion, serving
from tests.support.requests import tasks_snapshot

TEXTS = ["", "think of tiles", "think of tiles " * 50]


def config(model, **changes):
    given = {"sampler": "vllm", "model": str(model), "samples_per_task": 2}
    return SynthesisConfig(**given | {"server": ServerConfig(command=sys.executable)} | changes)


def test_a_served_model_s_own_tokenizer_counts_unless_another_is_configured(tmp_path):
    tiles, other = (
        build_small_model(tmp_path / name, [text], SmallModelConfig(vocab_size=512))
        for name, text in (("tiles", "think of tiles and of tiles " * 20), ("other", "0123456789"))
    )
    counts = [count_tokens(each, TEXTS) for each in (tiles, other)]
    assert counts[0] != counts[1]
    asked = (config(tiles), config(tiles, tokenizer=str(other)))
    assert [make_sampler(each, str(tmp_path)).count_tokens(TEXTS) for each in asked] == counts


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
