"""How candidates are verified."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from kernels_eval.config import EvalConfig


class VerificationConfig(BaseModel):
    """The protocol, and the machines that carry it out (which are no part of a verdict's key)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    eval: EvalConfig = EvalConfig()
    workers: int | None = Field(
        default=None,
        ge=1,
        description="devices used at once; default: every GPU, or half of the CPU cores",
    )
    builders: int | None = Field(
        default=None, ge=1, description="build workers; default: the other CPU cores"
    )
    chunk_size: int = Field(default=128, ge=1, le=1024, description="verdicts per Prefect task run")
    ray_address: str | None = Field(
        default=None, description="a Ray cluster; default: start one here"
    )
