"""Prefect's view of profiling correct candidates."""

from __future__ import annotations

from tasks.policy import stage_task
from tasks.profiling import stage

profile_kernels = stage_task(
    stage.run, stage.planned, "profile correct kernels", lambda **_: "profile the correct kernels"
)
