"""Prefect's view of the scoring."""

from __future__ import annotations

from prefect import task

from tasks.benchmark import stage
from tasks.benchmark.config import BenchmarkConfig
from tasks.benchmark.stage import Answers
from tasks.policy import stage_options
from tasks.store import SnapshotRef


@task(name="score the benchmark", **stage_options(stage.planned))
def score_benchmark(answers: list[Answers], config: BenchmarkConfig) -> SnapshotRef:
    return stage.run(answers, config)
