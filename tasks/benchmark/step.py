"""Prefect's view of the scoring."""

from __future__ import annotations

from prefect import task

from tasks.benchmark import stage
from tasks.benchmark.config import BenchmarkConfig
from tasks.benchmark.stage import Answers
from tasks.policy import rows_of, sentence, stage_options
from tasks.store.snapshot import SnapshotRef


def _score_the_benchmark(answers: list[Answers], config: BenchmarkConfig) -> str:
    return (
        f"score {', '.join(answer.model for answer in answers)} on"
        f" {', '.join(rows_of(answer.verdicts) for answer in answers)} answers"
    )


@task(
    name="score the benchmark",
    task_run_name=sentence(_score_the_benchmark),
    **stage_options(stage.planned),
)
def score_benchmark(answers: list[Answers], config: BenchmarkConfig) -> SnapshotRef:
    return stage.run(answers, config)
