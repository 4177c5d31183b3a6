"""How many devices an ablation has, and how many branches that makes at once."""

from __future__ import annotations

from flows.ablation.plan import AblationConfig
from flows.config import PipelineConfig


def visible_gpus(pipeline: PipelineConfig) -> int:
    """GPUs of this machine, or of the cluster where one is named."""
    from kernels_eval.cluster.ray import address_of

    if address_of(pipeline.verification.ray_address) == "local":
        from kernels_eval.devices import visible_gpus

        return len(visible_gpus())
    import ray

    from kernels_eval.cluster.ray import start_ray

    start_ray(pipeline.verification.ray_address)
    return int(ray.cluster_resources().get("GPU", 0))


def branches_at_once(config: AblationConfig, pipeline: PipelineConfig, gpus: int) -> int:
    """At most one branch a GPU, or a group of GPUs where training or serving takes several. Models
    that answer in this process answer on its first GPU, which Ray does not know of: then one at a
    time. Without GPUs as many as were asked for, else one.
    """
    if not gpus:
        return config.max_parallel_branches or 1
    if pipeline.synthesis.sampler != "vllm":
        return 1
    fit = max(1, gpus // max(pipeline.training.workers, pipeline.synthesis.server.tensor_parallel))
    return min(config.max_parallel_branches or fit, fit)
