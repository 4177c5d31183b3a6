"""Prefect's view of the observations."""

from __future__ import annotations

from tasks.observe import stage
from tasks.policy import rows_of, stage_task

analyse = stage_task(
    stage.run,
    stage.planned,
    "analyse the samples",
    lambda verdicts, **_: f"analyse the reasoning length of {rows_of(verdicts)} samples",
)
