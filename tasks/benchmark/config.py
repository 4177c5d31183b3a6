"""What a benchmark run scores."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from kernels_eval.records import Record, SamplingParams
from tasks.sources.config import TasksConfig

KS, SAMPLES_PER_TASK = (1, 5, 10), 5


class BenchmarkConfig(Record):
    """Held-out tasks, the models that answer them, and the metrics."""

    tasks: TasksConfig = TasksConfig(split="heldout")
    models: tuple[Literal["recorded", "base", "tuned"], ...] = Field(
        default=("recorded", "base", "tuned"), min_length=1
    )
    """recorded answers, the untuned base model, the base model with the new adapter"""
    samples_per_task: PositiveInt = SAMPLES_PER_TASK
    """answers that each model gives to each task"""
    sampling: SamplingParams = SamplingParams(max_tokens=4096)
    """sampling parameters of base and tuned; those not set are training.base_model's own, if
    known"""
    ks: tuple[int, ...] = tuple(k for k in KS if k <= SAMPLES_PER_TASK)
    """k of pass@k. Left out: those of 1, 5 and 10 that samples_per_task allows; one above it is
    not estimated"""
    token_limits: tuple[PositiveInt, ...] = ()
    """score each model again as if its answers had ended at this many tokens: a longer answer
    counts as none. For comparing models with different limits"""
    ps: tuple[float, ...] = (0.0, 0.5, 0.8, 1.0, 1.2, 1.5, 2.0)
    """p of fast_p"""

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
