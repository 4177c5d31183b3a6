"""Frozen base weights in 8 bits: an option, never a default, because what is learned is learned
against rounded weights.

Guarantees: weights are float8_e4m3 with one float32 scale per output row; activations and their
gradients are rounded to float8 per token where a GPU multiplies them (twice the rate of bfloat16
products on Hopper), and the same rounding is imitated elsewhere, so that losses compare; the
adapter stays as it is. Halves the memory of the base, which recomputation then spends. Does not
guarantee that an adapter trained so serves as well on bfloat16 weights: measure it. Merging into
rounded weights is refused by PEFT's arithmetic: merge on the original base.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

E4M3 = torch.float8_e4m3fn
LARGEST = (
    448.0  # of e4m3 (Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433, table 1)
)


def quantise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float8 values and float32 scales, one per row (last dimension): rows = values x scales[...,
    None], to 1 part in 16."""
    scales = rows.abs().amax(-1).float().clamp(min=1e-12) / LARGEST
    return (rows.float() / scales[..., None]).clamp(-LARGEST, LARGEST).to(E4M3), scales


def _product(
    left: torch.Tensor,
    left_scales: torch.Tensor,
    right: torch.Tensor,
    right_scales: torch.Tensor,
    out: torch.dtype,
) -> torch.Tensor:
    """(tokens, inner) x (columns, inner)^T, both float8 with a scale per row."""
    if left.is_cuda:
        return torch._scaled_mm(
            left,
            right.t(),
            scale_a=left_scales[:, None],
            scale_b=right_scales[None, :],
            out_dtype=out,
        )
    product = left.float() @ right.float().t()
    return (product * left_scales[:, None] * right_scales[None, :]).to(out)


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        context.save_for_backward(weight, scales)
        flat, x_scales = quantise(x.reshape(-1, x.shape[-1]))
        return _product(flat, x_scales, weight, scales, x.dtype).view(
            *x.shape[:-1], weight.shape[0]
        )

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        weight, scales = context.saved_tensors
        # the weight's scales belong to its rows, over which this product sums: they go into the
        # gradient before it is rounded
        scaled = gradient.reshape(-1, gradient.shape[-1]) * scales
        flat, gradient_scales = quantise(scaled)
        transposed = weight.t().contiguous()
        ones = torch.ones_like(scales[:1]).expand(transposed.shape[0])
        return (
            _product(flat, gradient_scales, transposed, ones.contiguous(), gradient.dtype).view(
                *gradient.shape[:-1], -1
            ),
            None,
            None,
        )


class Fp8Linear(nn.Module):
    """A frozen nn.Linear with float8 weights. `weight` has the shape it had."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight, scales = quantise(linear.weight.detach())
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("scales", scales, persistent=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = _Fp8Product.apply(x, self.weight, self.scales)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def round_base_weights(model: nn.Module) -> int:
    """Put float8 weights under every adapted nn.Linear of a PEFT model, one after the other, and
    return how many."""
    changed = 0
    for module in model.modules():
        if hasattr(module, "lora_A") and isinstance(getattr(module, "base_layer", None), nn.Linear):
            module.base_layer = Fp8Linear(module.base_layer)
            changed += 1
    return changed
