"""The student of the proof: what it reads, and that pretraining resumes and leaves a model."""

from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.proof import student
from flows.config import PipelineConfig, load_profile
from tasks.models import load_causal_model, load_tokenizer
from tasks.sources.small_model import SmallModelConfig

PROFILE = Path(__file__).with_name("profile.yaml")
TINY = SmallModelConfig(vocab_size=640, hidden_size=32, heads=2, kv_heads=1, intermediate_size=64)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    out = tmp_path_factory.mktemp("student") / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(student, "SHAPE", TINY)
        run(patch, "write", "--out", str(out), "--tasks", "6", "--samples", "2")
    return out


def run(patch, *arguments):
    patch.setattr("sys.argv", ["student", *arguments])
    assert student.main() == 0


def test_the_corpus_is_whole_chats_of_the_teacher(corpus):
    tokenizer = load_tokenizer(corpus / student.UNTRAINED)
    chats = tokenizer.decode(np.load(corpus / student.TOKENS)).split("<|im_start|>user\n")[1:]
    assert len(chats) == 12 and len(set(chats)) == 12
    for chat in chats:
        prompt, answer = chat.split("<|im_start|>assistant\n<think>\n")
        assert "Now the program to make faster" in prompt
        reasoning, _, module = answer.partition("\n</think>\n\n")
        assert reasoning and module.endswith("<|im_end|>")


@pytest.mark.slow
def test_pretraining_resumes_and_leaves_a_model_that_speaks(corpus, monkeypatch, capsys, tmp_path):
    out = tmp_path / "base"
    asked = ["pretrain", "--data", str(corpus), "--out", str(out), "--epochs", "2"]
    asked += ["--rows", "4", "--context", "256"]
    run(monkeypatch, *asked, "--limit-s", "0")
    assert "rerun to resume" in capsys.readouterr().out and not out.exists()
    run(monkeypatch, *asked)
    said = capsys.readouterr().out
    assert "done" in said and "step 2 " not in said
    assert load_causal_model(out, dtype=torch.float32).config.hidden_size == 32
    run(monkeypatch, *asked)
    assert "is there already" in capsys.readouterr().out


def test_the_proofs_settings_are_for_the_small_student():
    """Its window is 4,096 tokens; answers are as long as those of its benchmark, and the divergence
    from its first adapter is measured."""
    config = load_profile(str(PROFILE))
    recipe = config.reinforcement
    assert recipe.max_tokens == config.benchmark.sampling.max_tokens == 1600
    assert recipe.beta > 0 and recipe.learning_rate < config.training.learning_rate
    assert recipe.samples_per_task > PipelineConfig().reinforcement.samples_per_task
