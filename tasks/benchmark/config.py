"""What a benchmark run scores."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from kernels_eval.records import SamplingParams
from tasks.sources.config import TasksConfig

KS, SAMPLES_PER_TASK = (1, 5, 10), 5


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
    samples_per_task: int = Field(default=SAMPLES_PER_TASK, ge=1)
    sampling: SamplingParams = Field(
        default=SamplingParams(max_tokens=4096),
        description=(
            "sampling parameters of base and tuned; those not set are training.base_model's own, if"
            " known"
        ),
    )
    ks: tuple[int, ...] = Field(
        default=tuple(k for k in KS if k <= SAMPLES_PER_TASK),
        description=(
            "k of pass@k. Left out: those of 1, 5 and 10 that samples_per_task allows; one above it"
            " is not estimated"
        ),
    )
    token_limits: tuple[PositiveInt, ...] = Field(
        default=(),
        exclude_if=lambda limits: not limits,  # as for operator_times
        description=(
            "score each model again as if its answers had ended at this many tokens: a longer"
            " answer counts as none. For comparing models with different limits"
        ),
    )
    ps: tuple[float, ...] = Field(
        default=(0.0, 0.5, 0.8, 1.0, 1.2, 1.5, 2.0), description="p of fast_p"
    )
    resamples: int = Field(default=2000, ge=100, description="bootstrap resamples over tasks")
    operator_times: bool = Field(
        default=False,
        exclude_if=lambda asked: (
            not asked
        ),  # scores made before there was this key stay those of the same configuration
        description=(
            "profile the references, to say which operators correct answers replace; seconds a"
            " task, 4 more on a GPU"
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _asks_what_can_be_estimated(cls, data: Any) -> Any:
        """`ks` where it is left out: of KS, those that so many samples per task allow."""
        if (
            not isinstance(data, dict)
            or "ks" in data
            or not isinstance(samples := data.get("samples_per_task"), int)
        ):
            return data
        return data | {"ks": [k for k in KS if k <= samples] or [1]}
