"""Speed and memory of a training step: columns of the training log. Time excludes evaluation and
checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SPEED = ("tokens_per_s", "mfu", "memory_gb")


@dataclass(frozen=True)
class TrainingFlops:
    """FLOPs of LoRA training without recomputation, the base of MFU.

    After PaLM (https://arxiv.org/abs/2204.02311, appendix B), for frozen weights: 4 per token and
    weight of the base's matrix products (6 in the paper), 6 per adapter parameter, and three times
    causal attention's forward pass of 2 x length x width a layer."""

    per_token: float
    """FLOPs of the products"""
    per_pair: float
    """FLOPs of attention, to multiply by the square of a row's tokens"""

    @classmethod
    def of(cls, model: Any, loss_share: float) -> TrainingFlops:
        """FLOPs of a PEFT-wrapped causal model. The output projection is computed for `loss_share`
        of the tokens, those with loss."""
        config = model.config.get_text_config()
        size = getattr(config, "head_dim", None)
        width = size * config.num_attention_heads if size else config.hidden_size
        trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        output = model.get_output_embeddings().weight.numel()
        products = multiplied_parameters(model) - (1 - loss_share) * output
        return cls(4 * products + 6 * trained, 6 * config.num_hidden_layers * width)

    def row(self, tokens: int) -> float:
        return tokens * (self.per_token + tokens * self.per_pair)


def mfu(flops_per_s: float, peak: float | None, devices: int = 1) -> float | None:
    """Model FLOPs utilisation: TrainingFlops per second as a share of the devices' peak."""
    return flops_per_s / (peak * devices) if peak else None


def multiplied_parameters(model: Any) -> int:
    """Base model weights that multiply every token. An embedding table counts if it is also the
    output."""
    table, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    found = sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if weight.ndim > 1 and "lora_" not in name
    )
    tied = output is not None and output.weight is table
    return int(found if tied else found - table.numel())


def memory_gb() -> float:
    """Peak GPU memory since the process began, or the process's own without a GPU; 10^9 bytes."""
    import psutil
    import torch

    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated() / 1e9)
    return float(psutil.Process().memory_info().rss / 1e9)


def device_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
