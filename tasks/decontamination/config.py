"""What counts as the same task."""

from __future__ import annotations

from typing import Literal, get_args

from kernels_eval.records import Record

Level = Literal["exact", "normalised", "shapes", "operators", "near"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""Comparisons, in the order in which they are tried: the text; the traced graph; the graph without
sizes; operators and what flows between them; most of the operators or of the text."""


class DecontaminationConfig(Record):
    """When a training task counts as contained in the benchmark: at the first of LEVELS."""

    enabled: bool = True
    """leave out training tasks that are in the benchmark"""


class DeduplicationConfig(Record):
    """When two rows of a set are one: the same text or program. Changed sizes make another task."""

    enabled: bool = True
    """keep one of equal tasks and one of equal kernels of a task"""
