"""What a model asks of attention is seen: what no kernel here computes is refused by name, and what
is accelerated gives the same logits."""

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


# each with what the error names; Gemma2 without a window keeps its softcap
OTHERWISE = {
    "Mistral": ({"kind": "Mistral", "sliding_window": 8}, "sliding_window 8"),
    "Gemma2": ({"kind": "Gemma2", "sliding_window": 8, "head_dim": 8}, "softcap 50.0"),
    "Gemma2 in full": (
        {"kind": "Gemma2", "head_dim": 8, "layer_types": ["full_attention"] * 2},
        "softcap 50.0:",
    ),
    "Qwen2": (
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        "sliding_window 8",
    ),
    "dropout": ({"attention_dropout": 0.1}, "dropout 0.1"),
}
PLAIN = {
    "Mistral": {"kind": "Mistral", "sliding_window": None},
    "Gemma2": {
        "kind": "Gemma2",
        "head_dim": 8,
        "layer_types": ["full_attention"] * 2,
        "attn_logit_softcapping": None,  # the cap of the last logits is not attention's
    },
    "Qwen2": {"use_sliding_window": False, "sliding_window": 8},
    # a window that no layer has
    "Qwen2 in full": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
}


def farthest_logit(shape):
    """Largest difference of a logit that acceleration makes, over a row of three windows."""
    plain = adapted_qwen(initializer_range=0.5, attn_implementation="eager", **shape).eval()
    changed = copy.deepcopy(plain)
    accelerated(changed)
    ids = line()["input_ids"]
    with torch.no_grad():
        return float((plain(ids).logits - changed(ids).logits).abs().max())


@pytest.mark.parametrize("case", OTHERWISE)
def test_attention_that_is_not_causal_over_the_whole_row_is_refused_by_name(case):
    shape, named = OTHERWISE[case]
    adapted = adapted_qwen(attn_implementation="eager", **shape)
    state = torch.random.get_rng_state()
    with pytest.raises(UsageError, match=f"{shape.get('kind', 'Qwen2')}ForCausalLM .*{named}"):
        accelerated(adapted)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert adapted.get_base_model().config._attn_implementation == "eager", "left as it was"
    accelerated(adapted, attention="unchanged")  # transformers' own attention knows windows


@pytest.mark.parametrize("case", ["Mistral", "Gemma2", "Qwen2"])
def test_what_is_refused_would_be_computed_otherwise(case, monkeypatch):
    monkeypatch.setattr(attention, "beyond_causal", lambda *_: [])
    assert farthest_logit(OTHERWISE[case][0]) > 1e-2


@pytest.mark.parametrize("case", PLAIN)
def test_the_same_models_with_causal_attention_are_accelerated_to_the_same_logits(case):
    assert farthest_logit(PLAIN[case]) < 1e-4


@pytest.mark.parametrize(
    ("kind", "shape", "named"),
    [
        (
            "GptOss",
            {"num_local_experts": 2, "num_experts_per_tok": 1},
            ["sliding_window 128", "s_aux"],
        ),
        ("Llama4", {"attention_chunk_size": 8, "moe_layers": []}, ["attention_mask 8"]),
        ("Llama", {}, []),
    ],
)
def test_sinks_and_chunks_are_seen(kind, shape, named):
    base = adapted_qwen(kind=kind, head_dim=8, **shape).get_base_model()
    assert set(named) <= set(attention.beyond_causal(base, 2))
    assert named or not attention.beyond_causal(base, 2)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"attention_mask": torch.ones(2, 2, dtype=torch.bool)}, {"attention_mask": 1}),
        ({"is_causal": False}, {"bidirectional": True}),
        ({"of_tomorrow": 0.5}, {"of_tomorrow": 0.5}),
        ({"of_tomorrow": torch.zeros(2)}, {"of_tomorrow": True}),
        ({"scaling": 0.1, "position_ids": torch.arange(2), "sliding_window": None}, {}),
    ],
)
def test_an_argument_counts_unless_it_is_known_to_change_nothing(given, named):
    assert attention._asked(torch.nn.Identity(), **given) == named


def test_layers_with_an_attention_of_their_own_are_refused(monkeypatch):
    adapted = model()
    monkeypatch.setattr(
        type(adapted.get_base_model().model.layers[1].self_attn),
        "forward",
        lambda self, hidden_states, **_: (hidden_states, None),
    )
    with pytest.raises(UsageError, match="attention of its own 3"):
        accelerated(adapted)


def test_layers_are_counted_once_where_the_pass_needs_weights(monkeypatch):
    """A model that asks for a value amid its layers is passed through again."""
    adapted = model()
    layer = type(adapted.get_base_model().model.layers[1].mlp)
    forward = layer.forward

    def asking(self, hidden_states):
        return forward(self, hidden_states * float(hidden_states.abs().sum() >= 0))

    monkeypatch.setattr(layer, "forward", asking)
    accelerated(adapted)
