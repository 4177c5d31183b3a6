"""What counts as the same task."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from kernels_eval.records import Record

Level = Literal["exact", "normalised", "shapes", "operators", "near"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""Comparisons, in the order in which they are tried: the text; the traced graph; the graph without
sizes; operators and what flows between them; most of the operators or of the text."""


class DecontaminationConfig(Record):
    """When a training task counts as contained in the benchmark."""

    enabled: bool = True
    """leave out training tasks that are in the benchmark"""
    levels: tuple[Level, ...] = Field(default=LEVELS, min_length=1)
    """comparisons, always tried in the order of this default"""


class DeduplicationConfig(Record):
    """When two rows of a set are one. Changed sizes make another task here, unless `levels` has
    "shapes"."""

    enabled: bool = True
    """keep one of equal tasks and one of equal kernels of a task"""
    levels: tuple[Level, ...] = Field(default=("exact", "normalised"), min_length=1)
    """tasks: comparisons, in decontamination's order"""
