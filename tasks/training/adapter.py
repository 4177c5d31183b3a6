"""Checks of a trained adapter's directory: complete, finite, and changing its base model."""

from __future__ import annotations

from pathlib import Path

from kernels_eval.errors import UsageError
from kernels_eval.records import Record
from kernels_eval.written import json_of
from tasks.store.snapshot import ADAPTER_WEIGHTS

CONFIG = "adapter_config.json"


class AdapterFacts(Record):
    """What an adapter directory holds."""

    rank: int
    """what vLLM's --max-lora-rank must be at least"""
    target_modules: tuple[str, ...]
    modules: int
    """linear layers with a pair of matrices"""
    parameters: int
    size_bytes: int


def check_adapter(adapter_dir: Path) -> AdapterFacts:
    """Read every tensor of an adapter directory on the CPU. Raises UsageError unless it is PEFT's
    LoRA form with paired, finite matrices that change something."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    weights = adapter_dir / ADAPTER_WEIGHTS
    try:
        config = json_of((adapter_dir / CONFIG).read_text(encoding="utf-8"))
        rank, targets = int(config["r"]), sorted(config["target_modules"])
        tensors = load_file(weights)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UsageError(
            f"{adapter_dir} is no LoRA adapter: {error}", "give a directory that training wrote"
        ) from error
    first = {name for name in tensors if ".lora_A." in name}
    second = {name for name in tensors if ".lora_B." in name}
    if {name.replace(".lora_A.", ".lora_B.") for name in first} != second or not second:
        raise UsageError(f"{weights} holds matrices without their partners", "train again")
    if empty := [name for name, tensor in tensors.items() if not tensor.numel()]:
        raise UsageError(
            f"{len(empty)} of {len(tensors)} tensors in {weights} are empty, such as {empty[0]}",
            "gather sharded weights before the adapter is saved (as tasks.training does), and save"
            " it again",
        )
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise UsageError(
                f"{name} in {weights} holds values that are not finite",
                "train again, with a lower learning rate",
            )
    if not any(bool(tensors[name].any()) for name in second):  # LoRA starts so
        raise UsageError(
            f"the adapter in {weights} changes nothing: all its second matrices are zero",
            "train for two steps or more: the first of a warm-up has a learning rate of 0",
        )
    return AdapterFacts(
        rank=rank,
        target_modules=tuple(targets),
        modules=len(second),
        parameters=sum(tensor.numel() for tensor in tensors.values()),
        size_bytes=weights.stat().st_size,
    )
