"""What counts as the same task, for decontamination and deduplication. Defaults are measured:
benchmarks/results/2026-11-23-decontamination.md."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from tasks.sources.config import TasksConfig

Level = Literal["exact", "normalised", "shapes", "operators", "near"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""Comparisons, in the order in which they are tried."""


class Matching(BaseModel):
    """Thresholds of the levels that have one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_operators: int = Field(
        default=3,
        ge=1,
        description=(
            "a sequence of this many operators counts by itself; a shorter one only if the sizes"
            " of the inputs are also equal"
        ),
    )
    near_threshold: float = Field(
        default=0.6,
        gt=0,
        le=1,
        description="Jaccard similarity of shingles from which tasks are near-duplicates",
    )
    min_shared_operators: float = Field(
        default=0.7,
        ge=0,
        le=1,
        description=(
            "share of operators (multisets) that near-duplicates must have in common, where both"
            " are known"
        ),
    )
    shingle_tokens: int = Field(default=5, ge=2, le=20, description="tokens in a shingle")
    min_shingles: int = Field(
        default=30,
        ge=1,
        description="a class with fewer shingles is mostly boilerplate and never a near-duplicate",
    )


class DecontaminationConfig(Matching):
    """When a training task counts as contained in the benchmark."""

    enabled: bool = Field(
        default=True, description="leave out training tasks that are in the benchmark"
    )
    against: TasksConfig | None = Field(
        default=None,
        description=(
            "the tasks to compare with; null: those of benchmark.tasks, all of their levels"
        ),
    )
    levels: tuple[Level, ...] = Field(
        default=LEVELS,
        min_length=1,
        description="comparisons, always tried in the order of this default",
    )


class DeduplicationConfig(Matching):
    """When two rows of a set are one. Changed sizes make another task here, unless `levels` has
    "shapes"."""

    enabled: bool = Field(
        default=True, description="keep one of equal tasks and one of equal kernels of a task"
    )
    levels: tuple[Level, ...] = Field(
        default=("exact", "normalised"),
        min_length=1,
        description="tasks: comparisons, in decontamination's order",
    )
