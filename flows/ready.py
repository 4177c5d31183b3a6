"""Checks before a run of what would fail at its end: tasks, endpoint, tokenizers, models and their
GPU memory. Each is a sentence or an EvalError with its fix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from flows.config import PipelineConfig
from kernels_eval.devices import visible_gpus
from kernels_eval.errors import UsageError
from tasks.sources.config import TasksConfig
from tasks.synthesis import sizing
from tasks.synthesis.config import SynthesisConfig
from tasks.training.recipe import TrainingRecipe

Part = Literal["refresh", "training", "benchmark"]
PARTS: tuple[Part, ...] = ("refresh", "training", "benchmark")
Look = Callable[[], str]
SMALL = ("small", "small-pretrained")
GPUS = (2, 4, 8)


def checks(config: PipelineConfig, parts: tuple[Part, ...] = PARTS) -> Iterator[tuple[str, Look]]:
    synthesis, recipe, benchmark = config.synthesis, config.training, config.benchmark
    if "refresh" in parts:
        yield "tasks", lambda: task_source(config.tasks)
        if synthesis.sampler in ("openai", "agent"):
            yield "endpoint", lambda: endpoint(synthesis, config.root)
        yield "tokenizer", lambda: generator_tokenizer(synthesis, config.root)
        if synthesis.sampler == "vllm":
            yield "GPU memory: serving", lambda: serving_memory(synthesis)
    tuned = {"base", "tuned"} & set(benchmark.models)
    if "training" in parts or ("benchmark" in parts and tuned):
        yield "base model", lambda: tokenizer(recipe.base_model, config.root)
    if "training" in parts:
        yield "GPU memory: training", lambda: training_memory(recipe)
    if "benchmark" in parts:
        yield "benchmark tasks", lambda: task_source(benchmark.tasks)


def task_source(config: TasksConfig) -> str:
    from tasks.reporting.text import plural
    from tasks.sources.stage import load_tasks

    return f"{plural(len(load_tasks(config)), 'task')} of {config.source}"


def endpoint(config: SynthesisConfig, root: str) -> str:
    """Check the endpoint, unless a finished snapshot has this configuration's answers."""
    from tasks.store import snapshots
    from tasks.synthesis.samplers import require_endpoint

    asked = config.model_dump(mode="json")
    for there in snapshots(root, "synthesis"):
        if there.finished and there.manifest.get("config") == asked:
            return "not asked: all answers exist already"
    return require_endpoint(config)


def generator_tokenizer(config: SynthesisConfig, root: str) -> str:
    if config.tokenizer:
        return tokenizer(config.tokenizer, root)
    if config.counts_by_usage:
        return "none: reasoning is counted from the endpoint's usage"
    return "the generator's own"


def tokenizer(name: str, root: str) -> str:
    if name in SMALL:
        return f"{name}: built on this machine"
    from tasks.models import count_tokens
    from tasks.sources.small_model import resolve_model

    count_tokens(resolve_model(name, root), ["resolves"])
    return f"{name} resolves"


def serving_memory(config: SynthesisConfig) -> str:
    server, limit = config.server, config.sampling.max_tokens
    return _fits(
        str(config.model),
        sizing.planned_gpus(config.model, server, limit, len(visible_gpus())),
        sizing.GPU_SHARE,
        "synthesis.server.tensor_parallel={}",
        server.args,
    )


def training_memory(recipe: TrainingRecipe) -> str:
    """Check memory for weights: a share per worker with fsdp2, otherwise all."""
    if sizing.read_gpu() is None:
        return "no GPU: trains on the CPU"
    gpus = recipe.workers if recipe.parallelism in ("fsdp2", "auto") else 1
    fix = "training.parallelism=fsdp2 --set training.workers={}"
    return _fits(recipe.base_model, gpus, 1.0, fix)


def _fits(model: str, gpus: int, utilization: float, key: str, args: tuple[str, ...] = ()) -> str:
    if (gpu := sizing.read_gpu()) is None:
        return "unknown: no GPU"
    shape = sizing.read_shape(model) if model not in SMALL else None
    if shape is None or not shape.weight_bytes:
        return f"unknown: {model} is not on this machine"
    shape = shape.served(args)

    def left(held_by: int) -> int:
        return sizing.kv_cache_bytes(shape, gpu.memory_bytes, held_by, utilization) or 0

    found = (
        f"{model} has {shape.weight_bytes / 1e9:.0f} GB of weights, {gpus} x {gpu.name} have"
        f" {gpus * gpu.memory_bytes / 1e9:.0f} GB"
    )
    if left(gpus) > 0:
        return found
    enough = next((count for count in GPUS if left(count) > 0), None)
    raise UsageError(found, f"--set {key.format(enough)}" if enough else "use a smaller model")
