"""What counts as the same task, for decontamination and deduplication. Defaults are measured:
benchmarks/results/2026-11-23-decontamination.md."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, PositiveInt

from kernels_eval.records import Record
from tasks.sources.config import TasksConfig

Level = Literal["exact", "normalised", "shapes", "operators", "near"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""Comparisons, in the order in which they are tried."""


class Matching(Record):
    """Thresholds of the levels that have one."""

    min_operators: PositiveInt = 3
    """a sequence of this many operators counts by itself; a shorter one only if the sizes of the
    inputs are also equal"""
    near_threshold: float = Field(default=0.6, gt=0, le=1)
    """Jaccard similarity of shingles from which tasks are near-duplicates"""
    min_shared_operators: float = Field(default=0.7, ge=0, le=1)
    """share of operators (multisets) that near-duplicates must have in common, where both are
    known"""
    shingle_tokens: int = Field(default=5, ge=2, le=20)
    """tokens in a shingle"""
    min_shingles: PositiveInt = 30
    """a class with fewer shingles is mostly boilerplate and never a near-duplicate"""


class DecontaminationConfig(Matching):
    """When a training task counts as contained in the benchmark."""

    enabled: bool = True
    """leave out training tasks that are in the benchmark"""
    against: TasksConfig | None = None
    """the tasks to compare with; null: those of benchmark.tasks, all of their levels"""
    levels: tuple[Level, ...] = Field(default=LEVELS, min_length=1)
    """comparisons, always tried in the order of this default"""


class DeduplicationConfig(Matching):
    """When two rows of a set are one. Changed sizes make another task here, unless `levels` has
    "shapes"."""

    enabled: bool = True
    """keep one of equal tasks and one of equal kernels of a task"""
    levels: tuple[Level, ...] = Field(default=("exact", "normalised"), min_length=1)
    """tasks: comparisons, in decontamination's order"""
