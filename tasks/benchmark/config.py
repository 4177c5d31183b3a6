"""Settings of a benchmark run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from kernels_eval.records import Record, SamplingParams
from tasks.keys import LeastShare
from tasks.sources.config import TasksConfig

KS = (1, 5, 10)
PS = (0.0, 0.5, 0.8, 1.0, 1.2, 1.5, 2.0)
"""p of fast_p."""


class BenchmarkConfig(Record):
    """Held-out tasks, the models that answer them, and the metrics."""

    tasks: TasksConfig = TasksConfig(split="heldout")
    models: tuple[Literal["recorded", "base", "tuned"], ...] = Field(
        default=("recorded", "base", "tuned"), min_length=1
    )
    """recorded answers, the untuned base model, the base model with the new adapter"""
    samples_per_task: PositiveInt = 5
    """answers that each model gives to each task"""
    sampling: SamplingParams = SamplingParams(max_tokens=4096)
    """sampling parameters of base and tuned; those not set are training.base_model's own, if
    known"""

    min_kernel_share: LeastShare = None
    """the track "custom kernel" counts only kernels that take at least this share of their
    candidate's time (0.1); an unknown share does not count. Left out: any share, as KernelBench and
    the paper have it"""

    @property
    def ks(self) -> tuple[int, ...]:
        """k of pass@k: those of KS that the samples per task allow."""
        return tuple(k for k in KS if k <= self.samples_per_task)
