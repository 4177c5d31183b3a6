"""Models whose attention no kernel here computes are refused by name; what is accelerated gives the
same logits."""

import copy

import pytest
import torch

from kernels_eval.errors import UsageError
from tasks.training.acceleration import attention
from tests.support.accelerated import accelerated, line, model
from tests.support.training import adapted_qwen


def test_padding_on_the_left_is_refused():
    adapted = model()
    accelerated(adapted)
    with pytest.raises(ValueError, match="padding on the left"):
        adapted(torch.ones(1, 4, dtype=torch.long), attention_mask=torch.tensor([[0, 1, 1, 1]]))


WINDOW = {"use_sliding_window": True, "sliding_window": 8}
OTHERWISE = [
    ({"kind": "Mistral", "sliding_window": 8}, "sliding_window 8"),
    (WINDOW | {"max_window_layers": 1}, "sliding_window 8"),
    ({"attention_dropout": 0.1}, "dropout 0.1"),
    ({"kind": "Gemma2", "head_dim": 8}, "what gemma2 models may"),
    ({"kind": "StableLm"}, "what stablelm models may"),
]
PLAIN = [
    {"kind": "Mistral", "sliding_window": None},
    {"kind": "Llama"},
    {"kind": "Qwen3", "head_dim": 8},
    {"use_sliding_window": False, "sliding_window": 8},
    WINDOW | {"max_window_layers": 2},  # a window that no layer has
]


@pytest.mark.parametrize("shape, named", OTHERWISE)
def test_attention_that_is_not_causal_over_the_whole_row_is_refused_by_name(shape, named):
    adapted = adapted_qwen(attn_implementation="eager", **shape)
    with pytest.raises(UsageError, match=f"{shape.get('kind', 'Qwen2')}ForCausalLM .*{named}"):
        accelerated(adapted)
    assert adapted.get_base_model().config._attn_implementation == "eager", "left as it was"


def farthest_logit(shape):
    """Largest difference of a logit that acceleration makes, over a row of three windows."""
    plain = adapted_qwen(initializer_range=0.5, attn_implementation="eager", **shape).eval()
    changed = copy.deepcopy(plain)
    accelerated(changed)
    ids = line()["input_ids"]
    with torch.no_grad():
        return float((plain(ids).logits - changed(ids).logits).abs().max())


@pytest.mark.parametrize("shape", [shape for shape, named in OTHERWISE if "window" in named])
def test_what_is_refused_would_be_computed_otherwise(shape, monkeypatch):
    monkeypatch.setattr(attention, "beyond_causal", lambda *_: None)
    assert farthest_logit(shape) > 1e-2


@pytest.mark.parametrize("shape", PLAIN)
def test_causal_attention_is_accelerated_to_the_same_logits(shape):
    assert farthest_logit(shape) < 1e-4
