"""What counting and profiling a task's reference may take."""

from __future__ import annotations

from typing import Annotated

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from kernels_eval.records import Record
from tasks.keys import UNKEYED


class WorkloadConfig(Record):
    """Limits of counting one task."""

    timeout_s: PositiveFloat = 60
    """deadline of one task"""
    memory_gb: PositiveFloat = 4
    """resident memory of one task's process"""
    declared_max_bytes: NonNegativeInt = 1 << 30
    """declared inputs up to this many bytes are made for a task that does not run without
    storage"""
    jobs: Annotated[PositiveInt | None, UNKEYED] = None
    """parallel tasks; default: one per processor, at most 8"""


class ProfilingConfig(Record):
    """What profiling one task's reference may take, and on what it runs."""

    timeout_s: PositiveFloat = 60
    """deadline of one task"""
    memory_gb: PositiveFloat = 16
    """resident memory of one task's process"""
    budget_s: PositiveFloat = 0.3
    """time of the calls that are profiled; one call at least, 20 at most"""
    threads: PositiveInt = 1
    """CPU threads, as in verification"""
