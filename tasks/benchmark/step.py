"""Prefect's view of the scoring."""

from __future__ import annotations

from tasks.benchmark import stage
from tasks.policy import rows_of, stage_task

score_benchmark = stage_task(
    stage.run,
    stage.planned,
    "score the benchmark",
    lambda answers, **_: (
        f"score {', '.join(answer.model for answer in answers)} on"
        f" {', '.join(rows_of(answer.verdicts) for answer in answers)} answers"
    ),
)
