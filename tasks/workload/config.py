"""What counting and profiling a task's reference may take."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class WorkloadConfig(BaseModel):
    """What counting one task may take."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    timeout_s: float = Field(default=60, gt=0, description="deadline of one task")
    memory_gb: float = Field(default=4, gt=0, description="resident memory of one task's process")
    declared_max_bytes: int = Field(
        default=1 << 30,
        ge=0,
        description=(
            "declared inputs up to this many bytes are made for a task that does not run without"
            " storage"
        ),
    )
    jobs: int | None = Field(
        default=None,
        ge=1,
        description="tasks at a time; default: one for each processor, 8 at most",
    )

    @property
    def identity(self) -> dict[str, Any]:
        """What the result depends on."""
        return self.model_dump(exclude={"jobs"})


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
