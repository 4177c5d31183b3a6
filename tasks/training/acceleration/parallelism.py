"""Whether each accelerated worker holds the whole model or a share of it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kernels_eval.errors import UsageError
from tasks.training.acceleration import offloading
from tasks.training.acceleration.layers import MEMORY_SHARE
from tasks.training.acceleration.recomputation import BYTES, LayerShape, plan_recomputation

Parallelism = Literal["ddp", "fsdp2"]


def parallelism_for(
    base_model_dir: str | Path, *, lora_rank: int, tokens: int
) -> tuple[Parallelism, str]:
    """`choose_parallelism` for this process's GPU and micro batches of `tokens`. Raises UsageError
    for a model whose memory cannot be planned."""
    config = AutoConfig.from_pretrained(str(base_model_dir))
    device_bytes = torch.cuda.get_device_properties(0).total_memory
    with torch.device("meta"):  # its parameters, without reading them
        model = AutoModelForCausalLM.from_config(config)
    return choose_parallelism(
        LayerShape.of(config.get_text_config(), lora_rank),
        weight_bytes=BYTES * model.num_parameters(),
        device_bytes=device_bytes,
        tokens=tokens,
        margin_bytes=int(device_bytes * (1 - MEMORY_SHARE)),
        host_bytes=offloading.free_bytes(),
    )


def choose_parallelism(
    shape: LayerShape,
    *,
    weight_bytes: int,
    device_bytes: int,
    tokens: int,
    margin_bytes: int,
    host_bytes: int,
) -> tuple[Parallelism, str]:
    """How several accelerated workers hold a model, and why.

    `ddp` gathers nothing but leaves less memory for activations
    (benchmarks/results/2026-11-25-fsdp2-acceleration.md). It is chosen where half of the layers
    keep them, in device or main memory, and a worker's `host_bytes` hold the model once: each
    worker reads all of it.
    """
    if weight_bytes > host_bytes:
        return "fsdp2", "with ddp each worker reads the model into its share of main memory"
    try:
        whole = plan_recomputation(
            shape,
            device_bytes=device_bytes,
            # DDP holds the gradients twice
            weight_bytes=weight_bytes + 4 * shape.trained,
            trained=shape.trained,
            tokens=tokens,
            margin_bytes=margin_bytes,
            host_bytes=host_bytes,
        )
    except UsageError:
        return "fsdp2", f"one GPU does not hold the model and {tokens:,} tokens"
    kept = whole.keep + whole.host
    why = f"one GPU holds the model and the activations of {kept} of {shape.layers} layers"
    why += f", {whole.host} of them in main memory" if whole.host else ""
    return ("ddp" if 2 * kept >= shape.layers else "fsdp2"), why
