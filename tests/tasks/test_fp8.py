"""8-bit base weights: how far products, gradients and losses are from those of the weights they
round."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from tasks.training.acceleration import AccelerationOptions, accelerate
from tasks.training.fp8 import Fp8Linear, quantise, round_base_weights

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def test_rounding_is_relative_to_each_row():
    rows = torch.randn(8, 256) * torch.logspace(-6, 6, 8)[:, None]
    values, scales = quantise(rows)
    restored = values.float() * scales[:, None]
    assert values.dtype == torch.float8_e4m3fn
    for row, back in zip(rows, restored, strict=True):
        assert relative(back, row) < 0.04
    assert torch.isfinite(restored).all()
    zero_values, zero_scales = quantise(torch.zeros(2, 4))
    assert torch.equal(zero_values.float() * zero_scales[:, None], torch.zeros(2, 4))


def test_products_and_gradients_are_near_those_of_the_rounded_linear():
    torch.manual_seed(0)
    linear = torch.nn.Linear(256, 192).requires_grad_(False)
    linear.weight.mul_(
        torch.logspace(-2, 2, 192)[:, None]
    )  # rows of very different size: one scale for all would lose the small ones
    ours = Fp8Linear(linear)
    x, y = (torch.randn(3, 17, 256).requires_grad_() for _ in range(2))
    y.data.copy_(x.data)
    out, exact = ours(x), linear(y)
    for column in (slice(0, 64), slice(64, 128), slice(128, 192)):
        assert relative(out[..., column], exact[..., column]) < 0.06
    direction = torch.randn_like(out)
    out.backward(direction)
    exact.backward(direction)
    assert relative(x.grad, y.grad) < 0.06
    assert x.grad.shape == x.shape


def test_a_model_keeps_its_adapter_and_its_loss_moves_little():
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        config = Qwen2Config(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=96,
        )
        adapted = get_peft_model(
            Qwen2ForCausalLM(config), LoraConfig(r=4, lora_alpha=4, target_modules=PROJECTIONS)
        )
        return adapted.train()

    ids = torch.randint(0, 96, (1, 32), generator=torch.Generator().manual_seed(1))
    losses = {}
    for precision in ("bf16", "fp8"):
        adapted = model()
        accelerate(
            adapted,
            tokens=32,
            seed=0,
            options=AccelerationOptions(compile=False, base_precision=precision),
        )
        loss = adapted(ids, labels=ids).loss
        loss.backward()
        losses[precision] = float(loss.detach())
        trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
        assert all(parameter.dtype == torch.float32 for parameter in trained)
        assert (
            sum(float(parameter.grad.abs().sum()) > 0 for parameter in trained) >= len(trained) // 2
        )
    assert losses["bf16"] != losses["fp8"]
    assert abs(losses["bf16"] - losses["fp8"]) < 0.01 * losses["bf16"]


def test_all_adapted_products_are_rounded_and_nothing_else():
    config = Qwen2Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    adapted = get_peft_model(Qwen2ForCausalLM(config), LoraConfig(r=4, target_modules=PROJECTIONS))
    names = set(adapted.state_dict())
    assert round_base_weights(adapted) == 14
    assert set(adapted.state_dict()) == names
    assert adapted.get_base_model().lm_head.weight.dtype == torch.float32
