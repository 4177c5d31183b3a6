"""Prefect's view of profiling correct candidates."""

from __future__ import annotations

from prefect import task

from tasks.policy import stage_options
from tasks.profiling import stage

profile_kernels = task(
    name="profile correct kernels",
    task_run_name="profile the correct kernels",
    **stage_options(stage.planned),
)(stage.run)
