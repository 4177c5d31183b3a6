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


@pytest.mark.parametrize(
    "tokens, details, counted",
    [
        pytest.param(24, {"reasoning_tokens": 3}, 3, id="the endpoint counts reasoning"),
        pytest.param(24, None, 14, id="its share of what the endpoint counts: 14 of 24 characters"),
        pytest.param(None, None, None, id="no usage at all"),
    ],
)
def test_without_a_tokenizer_usage_counts_the_reasoning(tmp_path, tokens, details, counted):
    body = completion("An answer.", tokens=tokens, reasoning="think of tiles")
    if details:
        body["usage"]["completion_tokens_details"] = details
    with serving(lambda number, _: (200, body)) as server:
        asked = config("m", sampler="openai", base_url=server.url)
        tasks = tasks_snapshot(tmp_path)
        rows = Synthesis(tasks, asked, Language.CPP).run().open().read()
        assert rows["reasoning_tokens"].to_list() == [counted, counted]
        # a tokenizer that is named later counts what the endpoint could not, and asks for nothing
        build_small_model(tmp_path / "own", TEXTS[1:], SmallModelConfig(vocab_size=512))
        named = asked.model_copy(update={"tokenizer": str(tmp_path / "own")})
        again = Synthesis(tasks, named, Language.CPP).run().open().read()
        assert len(server.bodies) == 2
    own = 3 if details else count_tokens(tmp_path / "own", ["think of tiles"])[0]
    assert again["reasoning_tokens"].to_list() == [own, own]
