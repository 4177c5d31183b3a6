"""LoRA steps of a QwQ-32B-shaped model spread over GPUs by FSDP2: tokens per second, memory and
losses, by number of GPUs.

    python -m benchmarks.fsdp2_step --gpus 1,2 --length 8192 python -m benchmarks.fsdp2_step --gpus
    2 --shape tiny --cpu --steps 3        # two gloo processes, seconds

Needs as many GPUs as the largest number asks for, torch, transformers, PEFT and TRL; no weights and
no disk. The weights are random, made on each device for its own share alone, so that no process
ever holds the model whole. Precision and recomputation are those that training with `parallelism:
fsdp2` gets: frozen weights in bfloat16, LoRA as in the recipe in float32 with bfloat16 arithmetic
and reduction, each layer recomputed in the backward pass, TRL's loss, which never holds all logits.
Each layer is a unit of FSDP2, embeddings and head are one more; training has two for these, which
saves about 1.5 GB at a time. Each GPU takes one row of `--length` tokens a step (so N GPUs take N
rows). The first `--warmup` steps are not timed; the rest give a median. A number of GPUs on which
the model does not fit is reported as such, and the others still run. Losses are of random tokens:
only that they are finite, start near ln(vocabulary) and fall on the repeated row says something.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from benchmarks.shapes import QWQ_32B

SHAPES: dict[str, dict[str, int]] = {
    "qwq32b": QWQ_32B,
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
}
# tasks.training.recipe says where these come from; repeated here because a borrowed machine may
# have no pydantic (a test compares them)
LORA = {
    "r": 32,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
LEARNING_RATE, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-4, 0.0, 1.0
GIB = 2**30


def main() -> None:
    options = _options()
    counts = [int(count) for count in options.gpus.split(",")]
    results = [_run(options, count) for count in counts]
    _print(options, results)
    if options.out:
        options.out.write_text(
            json.dumps(
                {"options": {k: str(v) for k, v in vars(options).items()}, "results": results},
                indent=2,
            )
        )
    sys.exit(0 if any("tokens_per_s" in result for result in results) else 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gpus", default="1,2", help="numbers of GPUs (processes), one after the other"
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwq32b")
    parser.add_argument(
        "--layers", type=int, help="fewer layers than the shape has, for a smaller machine"
    )
    parser.add_argument("--length", type=int, help="tokens a row; default 8,192 (64 for tiny)")
    parser.add_argument("--steps", type=int, default=6, help="timed steps")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--no-recompute", action="store_true", help="keep all activations")
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="gloo processes on CPU cores: a rehearsal, no measurement",
    )
    parser.add_argument("--out", type=Path, help="write what is printed as JSON too")
    options = parser.parse_args()
    options.length = options.length or (64 if options.shape == "tiny" else 8192)
    return options


def _run(options: argparse.Namespace, processes: int) -> dict[str, Any]:
    """Start so many processes on this machine and give what the first one reports, or how it
    failed."""
    from torch import multiprocessing

    context = multiprocessing.get_context("spawn")
    reports = context.SimpleQueue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = [
        context.Process(target=_worker, args=(rank, processes, port, options, reports))
        for rank in range(processes)
    ]
    for worker in workers:
        worker.start()
    found: list[dict[str, Any]] = []
    while any(worker.is_alive() for worker in workers) and not any(
        "failed" in report for report in found
    ):
        if any(
            worker.exitcode for worker in workers
        ):  # killed: it said nothing, and the others wait for it
            break
        while not reports.empty():
            found.append(reports.get())
        time.sleep(0.05)
    while not reports.empty():
        found.append(reports.get())
    for worker in workers:
        worker.terminate()  # where one has failed, the others wait for it
        worker.join()
    failed = [report for report in found if "failed" in report]
    if failed or len(found) < processes:
        return {
            "gpus": processes,
            "failed": failed[0]["failed"] if failed else "a process ended without a word",
        }
    found.sort(key=lambda report: report["rank"])
    result = found[0] | {"gpus": processes, "peak_gib": [report["peak_gib"] for report in found]}
    result.pop("rank")
    return result


def _worker(
    rank: int, processes: int, port: int, options: argparse.Namespace, reports: Any
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    import torch

    warnings.filterwarnings(
        "ignore", message=".*gradient_checkpointing.* is deprecated", category=FutureWarning
    )  # PEFT's
    try:
        reports.put({"rank": rank} | _measure(rank, processes, options))
    except torch.OutOfMemoryError as error:
        reports.put({"failed": f"does not fit: {str(error).splitlines()[0][:200]}"})
    except Exception:
        reports.put({"failed": traceback.format_exc()})


def _measure(rank: int, processes: int, options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from torch import distributed

    if options.cpu:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    else:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    distributed.init_process_group("gloo" if options.cpu else "nccl")
    began = time.monotonic()
    model, parameters, trained = _model(options, device, rank)
    built_s = time.monotonic() - began
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )
    tokens = torch.randint(
        0,
        model.config.vocab_size,
        (1, options.length),
        device=device,
        generator=torch.Generator(device).manual_seed(rank),
    )
    if not options.cpu:
        torch.cuda.reset_peak_memory_stats()
    losses, times = [], []
    for _ in range(options.warmup + options.steps):
        _wait(device)
        start = time.monotonic()
        loss = model(input_ids=tokens, labels=tokens, fused_lm_head=True).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        _wait(device)
        times.append(time.monotonic() - start)
        mean = loss.detach().clone()
        distributed.all_reduce(mean)
        losses.append(mean.item() / processes)
    step_s = statistics.median(times[options.warmup :])
    result = {
        "parameters": parameters,
        "trained_parameters": trained,
        "build_s": round(built_s, 1),
        "step_s": round(step_s, 3),
        "tokens_per_s": round(processes * options.length / step_s, 1),
        "losses": [round(value, 4) for value in losses],
        "peak_gib": round(_peak_gib(device), 2),
    }
    distributed.destroy_process_group()  # not after a failure: it would wait for the others
    return result


def _model(options: argparse.Namespace, device: Any, rank: int) -> tuple[Any, int, int]:
    """The sharded model with random weights, its parameters, and those that are trained."""
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM, Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
    from trl.trainer.utils import add_fused_lm_head

    shape = SHAPES[options.shape] | (
        {"num_hidden_layers": options.layers} if options.layers else {}
    )
    # what the base class takes, which the signature does not name
    named: dict[str, Any] = {"attn_implementation": "sdpa"}
    config = Qwen2Config(**shape, **named, tie_word_embeddings=False, use_cache=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", bias="none", **LORA))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    causal = model.get_base_model()
    add_fused_lm_head(
        causal, outputs=("log_probs", "entropy", "is_top1")
    )  # the same fields as SFTTrainer asks for
    counted = (
        sum(p.numel() for p in model.parameters()),
        sum(p.numel() for p in model.parameters() if p.requires_grad),
    )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    layers = causal.model.layers
    for index, layer in enumerate(layers):
        if not options.no_recompute:
            layers[index] = checkpoint_wrapper(layer)
        fully_shard(layers[index], mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    causal.model.rotary_emb = Qwen2RotaryEmbedding(config).to(
        device
    )  # a buffer: to_empty left nonsense in it
    _fill(model, device, rank)
    return model.train(), *counted


def _fill(model: Any, device: Any, rank: int) -> None:
    """Random weights, each process its own shards. Norms are 1 and LoRA's second matrices 0, as in
    a model that is not trained yet."""
    import torch

    random = torch.Generator(device).manual_seed(1000 + rank)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shard = parameter.to_local()
            if "norm" in name:
                shard.fill_(1.0)
            elif "lora_B" in name or name.endswith("bias"):
                shard.zero_()
            else:
                shard.normal_(0, 0.02, generator=random)


def _wait(device: Any) -> None:
    import torch
    from torch import distributed

    if device.type == "cuda":
        torch.cuda.synchronize()
    distributed.barrier()


def _peak_gib(device: Any) -> float:
    import resource

    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def _print(options: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    import torch
    import transformers

    where = "CPU cores" if options.cpu else torch.cuda.get_device_name(0)
    print(
        f"{options.shape}, {options.layers or SHAPES[options.shape]['num_hidden_layers']} layers,"
        f" {options.length} tokens a row, {where}"
    )
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}; ln(vocabulary) is",
        end=" ",
    )
    print(f"{math.log(SHAPES[options.shape]['vocab_size']):.2f}")
    print(
        "\n| GPUs | tokens/s | a GPU | of the first | step s | peak GiB a GPU | built in s |"
        " losses |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    base = next(
        (result["tokens_per_s"] / result["gpus"] for result in results if "tokens_per_s" in result),
        None,
    )
    for result in results:
        if "failed" in result:
            print(f"| {result['gpus']} | {result['failed'].strip().splitlines()[-1]} |")
            continue
        alone = result["tokens_per_s"] / result["gpus"]
        peaks = ", ".join(f"{peak:.1f}" for peak in result["peak_gib"])
        losses = f"{result['losses'][0]:.3f} to {result['losses'][-1]:.3f}"
        print(
            f"| {result['gpus']} | {result['tokens_per_s']:,.0f} | {alone:,.0f} |"
            f" {alone / base:.0%} | {result['step_s']:.2f} | {peaks} | {result['build_s']:.0f} |"
            f" {losses} |"
        )
    for result in results:
        if "parameters" in result:
            print(
                f"\n{result['parameters']:,} parameters, {result['trained_parameters']:,} of them"
                " trained"
            )
            break
    for result in results:
        if "failed" in result:
            print(f"\n{result['gpus']} GPUs:\n{result['failed']}", file=sys.stderr)


if __name__ == "__main__":
    main()
