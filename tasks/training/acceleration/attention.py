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
OBSERVED = "concur_observed"
WITHOUT_EFFECT = {"position_ids", "use_cache"}
"""Arguments that models pass to attention without effect."""


def register() -> None:
    """Register the kernels with transformers. Idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name, function in KERNELS.items():
        AttentionInterface.register(name, functools.partial(_attend, function))
        AttentionMaskInterface.register(name, _no_mask)


def beyond_causal(base: Any, layers: int) -> list[str]:
    """What a causal model's attention uses beyond causal attention over the whole row (a window, a
    softcap, sinks, a mask, dropout), by name, as observed in a pass over two tokens."""
    from transformers.masking_utils import causal_mask_function

    def mask(mask_function: object, local_size: int = 0, **_: Any) -> Tensor | None:
        if mask_function is causal_mask_function:
            return None
        return torch.full((1, 1, 2, 2), local_size)  # counts where a layer is given it

    calls = _observed(base, mask)
    asked = {
        name: value for module, given in calls for name, value in _asked(module, **given).items()
    }
    if len(calls) != layers:
        asked["attention of its own"] = layers - len(calls)
    return [name if value is True else f"{name} {value}" for name, value in asked.items()]


def _observed(base: Any, mask: Callable[..., Tensor | None]) -> list[tuple[Any, dict[str, Any]]]:
    from transformers import AttentionInterface, AttentionMaskInterface

    calls = []

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **given: Any
    ) -> tuple[Tensor, None]:
        calls.append((module, {"attention_mask": mask, **given}))
        return _attend(_sdpa, module, query, key, value, None)

    AttentionInterface.register(OBSERVED, attend)
    AttentionMaskInterface.register(OBSERVED, mask)
    _pass_through(base, calls)
    return calls


def _asked(
    module: Any,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **given: Any,
) -> dict[str, Any]:
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    asked = {name: isinstance(value, Tensor) or value for name, value in given.items()} | {
        "attention_mask": attention_mask is not None and (int(attention_mask.max()) or True),
        # evaluation passes 0 where training would drop
        "dropout": dropout or getattr(module, "attention_dropout", None),
        "bidirectional": not causal,
    }
    return {name: value for name, value in asked.items() if value and name not in WITHOUT_EFFECT}


def _pass_through(base: Any, calls: list[Any]) -> None:
    """Pass two tokens through a causal model, without weights where its code allows that."""
    before = base.config._attn_implementation
    base.config._attn_implementation = OBSERVED
    weights = {**dict(base.model.named_parameters()), **dict(base.model.named_buffers())}
    shapes = {name: tensor.to("meta") for name, tensor in weights.items()}
    try:
        try:
            _two_tokens(base.model, shapes)
        except (RuntimeError, NotImplementedError):  # it asks what a value is
            calls.clear()
            _two_tokens(base.model, weights)
    finally:
        base.config._attn_implementation = before


def _two_tokens(model: torch.nn.Module, tensors: dict[str, Tensor]) -> None:
    device = next(iter(tensors.values())).device
    ids = torch.ones(1, 2, dtype=torch.long, device=device)
    given = {"input_ids": ids, "use_cache": False}
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.func.functional_call(model, tensors, kwargs=given)


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
    """Attend from (batch, heads, length, size) to (batch, length, heads, size)."""
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
