"""How correct candidates are profiled."""

from __future__ import annotations

from pydantic import PositiveFloat

from kernels_eval.records import Json, Record


class ProfileConfig(Record):
    """What profiling one correct candidate may take. No part of a verdict's key."""

    enabled: bool = False
    """profile every correct candidate"""
    metrics: bool = True
    """ask ncu for hardware counters, where there is a GPU"""
    timeout_s: PositiveFloat = 120
    """deadline of one program"""
    budget_s: PositiveFloat = 0.3
    """time of the calls that are profiled by operator"""

    @property
    def identity(self) -> Json:
        """What the result depends on."""
        return self.model_dump(exclude={"enabled"})
