"""Contexts of a night that is half over. The engine itself needs a GPU and vLLM."""

import argparse
import random
import tomllib
from pathlib import Path

import pytest

import benchmarks.decoding
from benchmarks.decoding import contexts, place, step
from benchmarks.shapes import QWQ_32B

VALUES = tomllib.loads(Path(benchmarks.decoding.__file__).with_name("night.toml").read_text())


def test_contexts_fill_the_room_and_five_share_a_prompt():
    asked = argparse.Namespace(seed=0, samples=5, tokens=192, most=512)
    found, prompt = contexts(asked, VALUES, 268_528), VALUES["prompt_tokens"]["range"][1]
    assert 40 < len(found) < 80
    assert found[0][:prompt] == found[4][:prompt] != found[5][:prompt]
    held = sum(len(each) - prompt + 384 for each in found) + prompt * -(-len(found) // 5)
    assert 0.85 * 268_528 < held <= 0.97 * 268_528
    assert max(map(max, found)) < QWQ_32B["vocab_size"]
    assert len(contexts(argparse.Namespace(**vars(asked) | {"most": 7}), VALUES, 10**9)) == 7


def test_answers_that_are_being_written_are_longer_than_answers():
    draws = random.Random(1)
    places = [place(draws, VALUES) for _ in range(20_000)]
    # half of the mean square over the mean, which night.toml has as answer_spread: 1.27 * 7,000 / 2
    assert sum(places) / len(places) == pytest.approx(1.27 * 7000 / 2, rel=0.05)
    assert min(places) >= 0 and max(places) <= VALUES["token_limit"]["range"][0]


class Engine:
    def step(self):
        output = argparse.Namespace(token_ids=[5, 6, 7])
        return [argparse.Namespace(request_id="1", outputs=[output])]


def test_a_step_notes_how_much_is_written():
    written = {"0": 2, "1": 1}
    step(Engine(), written)
    assert written == {"0": 2, "1": 3}
