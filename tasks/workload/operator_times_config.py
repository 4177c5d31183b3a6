"""What profiling one task's reference may take."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ProfilingConfig(BaseModel):
    """What profiling one task's reference may take, and on what it runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    timeout_s: float = Field(default=60, gt=0, description="deadline of one task")
    memory_gb: float = Field(default=16, gt=0, description="resident memory of one task's process")
    budget_s: float = Field(
        default=0.3,
        gt=0,
        description="time of the calls that are profiled; one call at least, 20 at most",
    )
    threads: int = Field(default=1, ge=1, description="CPU threads, as in verification")
