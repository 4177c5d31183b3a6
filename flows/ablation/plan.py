"""An ablation's configuration and its branches. Light to import.

A seed decides curation's draws, training and the tuned model's answers, not held-out tasks or
shared answers. Branches of equal rows and seed are one training.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from pathlib import Path

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt

from flows.config import PipelineConfig, load_profile, load_strategy
from kernels_eval.errors import UsageError
from kernels_eval.records import Record
from kernels_eval.settings import validated
from tasks.curation.config import CurationConfig
from tasks.synthesis import sizing

DEFAULT_STRATEGIES = ("concur", "random", "min_length", "speedup")


class AblationConfig(Record, title="concur ablate"):
    """An ablation: every strategy at every size with every seed is curated, trained and
    benchmarked, on the same samples."""

    profile: str = Field(default="ablation", min_length=1)
    """a profile's name, or the path of a YAML file: everything but strategy, size and seed comes
    from it"""
    overrides: tuple[str, ...] = ()
    """keys of the profile as key.path=value, such as training.num_epochs=1"""
    strategies: tuple[str, ...] = Field(default=DEFAULT_STRATEGIES, min_length=1, max_length=64)
    """names, or paths of YAML files that hold the keys of curation; the first is what the others
    are compared with"""
    sizes: tuple[PositiveInt | None, ...] = Field(default=(None,), min_length=1, max_length=32)
    """how many samples a training set has at most; null: the profile's curation.size, or as many
    as the strategy takes"""
    seeds: tuple[NonNegativeInt, ...] = Field(default=(0, 1), min_length=1, max_length=64)
    """one branch each: of what curation draws, of training, and of the tuned model's answers"""
    max_parallel_branches: int | None = Field(default=None, ge=1, le=256, title="Branches at once")
    """null: as many as the GPUs hold, each branch with GPUs of its own; one without a GPU"""
    verdicts: str | None = Field(default=None, min_length=1)
    """fingerprint of a verification snapshot under the root to start from; null: refresh the
    data set first"""


class Plan(Record):
    """One branch: its name and its own configuration. `size` is None where all that the strategy
    takes is used."""

    name: str
    strategy: str
    size: int | None
    seed: int
    curation: CurationConfig


def ablation_config(**asked: object) -> AblationConfig:
    """An AblationConfig from a command's values; None keeps the default. Raises UsageError that
    names the value."""
    given = {name: value for name, value in asked.items() if value is not None}
    return validated(AblationConfig, given, "concur ablate")


def pipeline_of(config: AblationConfig) -> PipelineConfig:
    """The profile with its overrides. Raises UsageError as `load_profile` does, and where an
    ablation could compare or train nothing."""
    pipeline = load_profile(config.profile, config.overrides)
    if "tuned" not in pipeline.benchmark.models:
        raise UsageError(
            "the benchmark leaves out the tuned model, which is what an ablation compares",
            "add it: --set 'benchmark.models=[recorded, base, tuned]'",
        )
    if "://" in pipeline.root:
        raise UsageError(
            f"root {pipeline.root} is not a local directory", "training needs one: --set root=DIR"
        )
    return pipeline


def planned_branches(config: AblationConfig, curation: CurationConfig) -> tuple[Plan, ...]:
    """Branches by strategy, then size, then seed; other keys of curation are the profile's. Raises
    UsageError for an unknown strategy or two branches of one name."""
    rules = {
        name: (load_strategy(name, base=curation), label_of(name))
        for name in dict.fromkeys(config.strategies)
    }
    found: list[Plan] = []
    for name, size, seed in product(
        rules, dict.fromkeys(config.sizes), dict.fromkeys(config.seeds)
    ):
        rule, label = rules[name]
        own = rule.model_copy(update={"seed": seed} | ({} if size is None else {"size": size}))
        branch = f"{label}-{own.size or 'all'}-seed{seed}"
        found.append(Plan(name=branch, strategy=label, size=own.size, seed=seed, curation=own))
    counts = Counter(plan.name for plan in found)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise UsageError(
            f"two branches are called {twice[0]}",
            "give strategy files different names, and each size once",
        )
    return tuple(found)


def label_of(strategy: str) -> str:
    """A strategy's label in tables and MLflow: its name, or its file's. Raises UsageError for a
    name with other characters."""
    is_file = strategy.endswith((".yaml", ".yml")) or "/" in strategy
    label = Path(strategy).stem if is_file else strategy
    if not re.fullmatch(r"[\w.-]{1,60}", label):
        raise UsageError(
            f"{strategy!r} is not a valid name for a strategy",
            "use letters, digits, dots, - and _: rename the file",
        )
    return label


def branch_pipeline(
    pipeline: PipelineConfig, plan: Plan, *, share: int | None = None
) -> PipelineConfig:
    """Configuration of one branch. Sample i of seed s has the profile's seed plus s x
    samples_per_task + i. `share` is the number of GPUs for the branch."""
    benchmark, synthesis = pipeline.benchmark, pipeline.synthesis
    first = benchmark.sampling.seed + plan.seed * benchmark.samples_per_task
    sampling = benchmark.sampling.model_copy(update={"seed": first})
    changes: dict[str, BaseModel] = {
        "curation": plan.curation,
        "training": pipeline.training.model_copy(update={"seed": plan.seed}),
        "benchmark": benchmark.model_copy(update={"sampling": sampling}),
    }
    if share is not None:
        each = _gpus_a_replica(pipeline, share)
        replicas = synthesis.server.replicas or max(1, share // each)
        served = {"replicas": replicas, "tensor_parallel": each}
        server = synthesis.server.model_copy(update=served)
        workers = pipeline.verification.workers or share
        changes["verification"] = pipeline.verification.model_copy(update={"workers": workers})
        changes["synthesis"] = synthesis.model_copy(update={"server": server})
    return pipeline.model_copy(update=changes)


# -- devices ---------------------------------------------------------------------------------------


def visible_gpus(pipeline: PipelineConfig) -> int:
    from kernels_eval import devices
    from kernels_eval.pool.ray import address_of, start_ray

    if address_of(pipeline.verification.ray_address) == "local":
        return len(devices.visible_gpus())
    import ray

    start_ray(pipeline.verification.ray_address)
    return int(ray.cluster_resources().get("GPU", 0))


def branches_at_once(config: AblationConfig, pipeline: PipelineConfig, gpus: int) -> int:
    """At most one branch per GPU, or per group that training or serving takes. Models sampled in
    this process use its first GPU: then one at a time. Without GPUs the requested number, else
    one."""
    if not gpus:
        return config.max_parallel_branches or 1
    if pipeline.synthesis.sampler != "vllm":
        return 1
    fit = max(1, gpus // max(pipeline.training.workers, _gpus_a_replica(pipeline, gpus)))
    return min(config.max_parallel_branches or fit, fit)


def _gpus_a_replica(pipeline: PipelineConfig, gpus: int) -> int:
    limit = pipeline.benchmark.sampling.max_tokens
    base = pipeline.training.base_model
    return sizing.planned_gpus(base, pipeline.synthesis.server, limit, gpus)
