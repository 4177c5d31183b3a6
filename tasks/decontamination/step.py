"""Prefect's view of training task selection."""

from __future__ import annotations

from tasks.decontamination import stage
from tasks.policy import rows_of, stage_task

choose_tasks = stage_task(
    stage.run,
    stage.planned,
    "choose training tasks",
    lambda tasks, **_: f"leave out of {rows_of(tasks)} tasks those that the benchmark knows",
)
