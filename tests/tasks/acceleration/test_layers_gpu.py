"""What only a GPU has: the choice of attention, generated code under autocast."""

import copy

import pytest
import torch

from tasks.training.acceleration.attention import SDPA, fastest_attention
from tasks.training.acceleration.layers import AccelerationOptions, accelerate
from tests.support.accelerated import line
from tests.support.training import adapted_qwen, use_plan

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def model(dropout=0.0):
    return adapted_qwen(
        dropout=dropout,
        rank=16,
        spread=0.02,
        base=(CUDA, torch.bfloat16),
        hidden_size=256,
        intermediate_size=512,
    )


def loss_and_gradient(adapted, row):
    adapted.zero_grad()
    row = {name: value.to(CUDA) for name, value in row.items()}
    labels = row.pop("labels")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = adapted(**row).logits.float()
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")
    loss.backward()
    return float(loss), torch.cat(
        [parameter.grad.flatten() for parameter in adapted.parameters() if parameter.requires_grad]
    )


def relative(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


def test_attention_is_chosen_by_time():
    times = fastest_attention(8, 2, 128, 1024, CUDA)
    assert SDPA in times
    assert list(times.values()) == sorted(times.values())
    assert min(times.values()) > 0


@pytest.mark.parametrize("recompute", ["layer", "mlp", "keep"])
@pytest.mark.parametrize("attention", ["sdpa", "cudnn", "cudnn_expanded"])
def test_generated_code_computes_what_the_plain_model_does(recompute, attention):
    plain = model()
    changed = copy.deepcopy(plain)
    accelerate(
        changed,
        tokens=256,
        seed=0,
        options=AccelerationOptions(recompute=recompute, attention=attention),
    )
    theirs, ours = (
        loss_and_gradient(plain, line(256)),
        loss_and_gradient(changed, line(256)),
    )
    assert ours[0] == pytest.approx(theirs[0], rel=2e-3)
    assert relative(ours[1], theirs[1]) < 0.03


def test_generated_code_draws_the_masks_of_the_uncompiled_one():
    eager, compiled = model(dropout=0.3), model(dropout=0.3)
    accelerate(eager, tokens=256, seed=5, options=AccelerationOptions(compile=False))
    accelerate(compiled, tokens=256, seed=5)
    for _ in range(2):
        theirs, ours = (
            loss_and_gradient(eager, line(256)),
            loss_and_gradient(compiled, line(256)),
        )
        assert ours[0] == pytest.approx(theirs[0], rel=2e-3)
        assert relative(ours[1], theirs[1]) < 0.03


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def test_activations_come_back_from_main_memory_as_they_were(deterministic, monkeypatch):
    """Wide enough that a copy takes longer than a layer: a tensor that is read before it has come
    back, or given up before it has left, changes the gradient."""
    row, layers = line(4096), 8
    gradients = []
    for counts in ({"keep": layers}, {"host": layers - 1, "keep": 1}):
        use_plan(monkeypatch, **counts)
        adapted = adapted_qwen(
            dropout=0.3,
            rank=16,
            spread=0.02,
            base=(CUDA, torch.bfloat16),
            hidden_size=256,
            intermediate_size=16_384,
            num_hidden_layers=layers,
        )
        accelerate(adapted, tokens=4096, seed=5, options=AccelerationOptions(attention="sdpa"))
        gradients.append([loss_and_gradient(adapted, row) for _ in range(3)])
    for kept, moved in zip(*gradients, strict=True):
        assert kept[0] == moved[0] and torch.equal(kept[1], moved[1])
