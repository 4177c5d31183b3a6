"""What a benchmark run scores."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from kernels_eval.records import SamplingParams
from tasks.sources.config import TasksConfig


class BenchmarkConfig(BaseModel):
    """Held-out tasks, the models that answer them, and the metrics.

    Attributes:
        samples_per_task: answers that each model gives to each task
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tasks: TasksConfig = TasksConfig(split="heldout")
    models: tuple[Literal["recorded", "base", "tuned"], ...] = Field(
        default=("recorded", "base", "tuned"),
        min_length=1,
        description="recorded answers, the untuned base model, the base model with the new adapter",
    )
    samples_per_task: int = Field(default=5, ge=1)
    sampling: SamplingParams = Field(
        default=SamplingParams(max_tokens=4096),
        description="how base and tuned are asked; what is not set is training.base_model's own, if known",
    )
    ks: tuple[int, ...] = Field(default=(1, 5, 10), description="k of pass@k; one above samples_per_task is not estimated")
    ps: tuple[float, ...] = Field(default=(0.0, 0.5, 0.8, 1.0, 1.2, 1.5, 2.0), description="p of fast_p")
    resamples: int = Field(default=2000, ge=100, description="bootstrap resamples over tasks")
