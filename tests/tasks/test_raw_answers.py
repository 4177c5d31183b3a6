"""Raw answers outlive the parser: a better one reaches them without a request."""

import pytest

from kernels_eval.records import Language
from tasks.synthesis import stage
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.parsing import Parsed, parse_response
from tasks.synthesis.stage import Synthesis, parsed_again
from tests.support.chat_server import completion, serving
from tests.support.requests import tasks_snapshot

CODE = "class ModelNew: pass\n"
BLOCK = f"```python\n{CODE}```"
DERIVED = ("reasoning", "answer", "code", "parse_reason", "reasoning_tokens")


@pytest.fixture
def tasks(tmp_path):
    return tasks_snapshot(tmp_path)


def better(text, **given):
    """A parser that finds code without a fence, and knows what the server separated."""
    return Parsed(reasoning=str(given["reasoning"]), answer=text, code=f"# found\n{text}\n")


def sampled(tasks, url):
    config = SynthesisConfig(sampler="openai", model="m", base_url=url, samples_per_task=2)
    return Synthesis(tasks, config, Language.CPP).run().open().read()


def test_a_better_parser_reaches_kept_answers_without_a_request(tasks, monkeypatch):
    with serving(lambda *_: (200, completion("no fence", reasoning_content="hm"))) as server:
        before = sampled(tasks, server.url)
        assert len(server.bodies) == 2 and before["code"].null_count() == 2
        url = server.url
    # nothing listens at the address any more
    assert sampled(tasks, url).equals(before)
    monkeypatch.setattr(stage, "parse_response", better)
    assert sampled(tasks, url).equals(before), "the same version finds its finished snapshot"
    monkeypatch.setattr(stage, "PARSER_VERSION", stage.PARSER_VERSION + 1)
    after = sampled(tasks, url)
    assert after["code"].to_list() == ["# found\nno fence\n"] * 2
    assert after["reasoning"].to_list() == ["hm"] * 2, "what the server separated was kept"
    raw = [name for name in before.columns if name not in DERIVED]
    assert after.select(raw).equals(before.select(raw)) and "candidate_id" in raw


RESPONSES = [
    (f"<think>hm</think>\nHere:\n{BLOCK}", None),
    (f"Here:\n{BLOCK}", "hm"),
    (f"Here:\n{BLOCK}", None),
    ("nothing", "hm"),
    (f"hm\n{BLOCK}\n</think>\nThat is all.", None),
    ("That is all.", f"hm\n\n{BLOCK}"),
    ("That is all.", BLOCK),
    ("", f"hm\n\n{BLOCK}"),
    ("", None),
]


@pytest.mark.parametrize("response, reasoning", RESPONSES)
def test_parsing_again_gives_the_same_row(response, reasoning):
    parsed = parse_response(response, reasoning=reasoning, finish_reason="stop")
    row = {"response": response, "finish_reason": "stop", **parsed.model_dump()}
    row |= {"reasoning_tokens": 9, "completion_tokens": None, "turn": 2}
    row |= {"separated_reasoning": reasoning}
    again = parsed_again(row, lambda texts: pytest.fail("the reasoning is the same"))
    assert again == row


def test_tokens_are_counted_again_where_the_reasoning_changes():
    row = {"response": f"<think>hm</think>{BLOCK}", "reasoning": "", "reasoning_tokens": 0}
    row |= {"separated_reasoning": None, "finish_reason": "stop", "completion_tokens": None}
    assert parsed_again(row, lambda texts: [len(text) for text in texts])["reasoning_tokens"] == 2
    assert parsed_again(row, lambda texts: None)["reasoning_tokens"] is None
