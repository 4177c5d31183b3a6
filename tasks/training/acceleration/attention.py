"""Causal attention kernels for training rows, registered with transformers.

Guarantees: causal, right padding only (else refused), no mask in memory. Does not guarantee equal
bits between kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SDPA, CUDNN, CUDNN_EXPANDED = "concur_sdpa", "concur_cudnn", "concur_cudnn_expanded"
PLAIN = ("llama", "mistral", "qwen2", "qwen3")
"""Types of models whose attention is causal over the whole row, but for a window or dropout."""


def register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    for name, function in KERNELS.items():
        AttentionInterface.register(name, functools.partial(_attend, function))
        AttentionMaskInterface.register(name, _no_mask)


def beyond_causal(config: Any) -> str | None:
    """What a model's configuration asks of attention beyond causal attention over the whole row;
    None for nothing."""
    if config.model_type not in PLAIN:
        return f"what {config.model_type} models may"
    window, layers = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if window and (layers is None or "sliding_attention" in layers):
        return f"sliding_window {window}"
    return f"dropout {config.attention_dropout}" if config.attention_dropout else None


def fastest_attention(
    heads: int,
    key_value_heads: int,
    head_size: int,
    tokens: int,
    device: torch.device,
) -> dict[str, float]:
    """Median milliseconds of a forward and backward pass by kernel, fastest first. CUDA only.
    Kernels that fail or differ much from `concur_sdpa` are left out."""
    from triton.testing import do_bench

    generator = torch.Generator(device).manual_seed(0)
    shapes = [(1, count, tokens, head_size) for count in (heads, key_value_heads, key_value_heads)]
    inputs = query, key, value = tuple(
        torch.randn(
            shape, dtype=torch.bfloat16, device=device, generator=generator
        ).requires_grad_()
        for shape in shapes
    )

    def passes(kernel: Callable[..., Tensor]) -> list[Tensor]:
        output = kernel(query, key, value, head_size**-0.5)
        gradients = torch.autograd.grad(output.float().square().sum(), inputs)
        return [output.detach(), *gradients]

    reference, times = None, {}
    for name, kernel in KERNELS.items():
        try:
            found = [tensor.float() for tensor in passes(kernel)]
            elapsed = do_bench(functools.partial(passes, kernel), return_mode="median")
        except RuntimeError:
            continue
        if reference is None:
            reference = found
        elif any(
            ((ours - theirs).norm() / theirs.norm()).item() > 0.02
            for ours, theirs in zip(found, reference, strict=True)
        ):
            continue
        times[name] = elapsed
    return dict(sorted(times.items(), key=lambda item: item[1]))


def _attend(
    kernel: Callable[..., Tensor],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    output = kernel(query, key, value, scaling)
    return output.transpose(1, 2).contiguous(), None


def _sdpa(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
    )


def _cudnn(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    # the operator itself: which kernel scaled_dot_product_attention takes depends on flags of the
    # process at the moment of tracing
    output: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, True, False, scale=scaling
    )[0]
    return output


def _cudnn_expanded(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    return _cudnn(
        query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), scaling
    )


KERNELS = {SDPA: _sdpa, CUDNN: _cudnn, CUDNN_EXPANDED: _cudnn_expanded}


def _no_mask(attention_mask: Tensor | None = None, **_: Any) -> None:
    """Return no mask. Raises ValueError for padding that is not on the right."""
    if attention_mask is not None and bool((attention_mask[:, 1:] > attention_mask[:, :-1]).any()):
        raise ValueError(
            "padding on the left or amid a row: this attention is for training rows padded on the"
            " right"
        )
