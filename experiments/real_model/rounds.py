"""Rounds of expert iteration, and their results.

    python -m experiments.real_model.rounds --profile P --rounds 2 --out real-results

scores the base model on the held-out tasks; then each round samples answers to the training tasks
(from the base model, later from the last adapter), verifies and curates them, trains a new adapter
of the base model, and scores it. With `--taught FILE` the first round's answers are those of a
table. The results are written after the base and after every round; the same command resumes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from pathlib import Path

from experiments.real_model.results import Scored, write_results
from flows.config import PipelineConfig, load_profile
from flows.launch import embed, require_ready, served_and_shown
from kernels_eval.devices import visible_gpus
from kernels_eval.errors import EvalError
from tasks.progress import observed_by
from tasks.store.snapshot import SnapshotRef


class Clock:
    """An observer of progress: seconds of each stage, from its beginning to that of the next."""

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)
        self._stage, self._since = "start", time.monotonic()

    def __call__(self, stage: str, done: int, total: int, note: str) -> None:
        if not total:  # a stage begins
            self.turn(stage)

    def turn(self, stage: str) -> None:
        now = time.monotonic()
        self.seconds[self._stage] += now - self._since
        self._stage, self._since = stage, now

    def taken(self) -> dict[str, float]:
        """Seconds since the last call."""
        self.turn("results")
        seconds = dict(self.seconds)
        self.seconds.clear()
        return seconds


def scored_by(config: PipelineConfig, name: str, trained: SnapshotRef | None) -> Scored:
    """The held-out answers of the base model, or of an adapter."""
    from flows.benchmark import benchmark_models

    models = {"models": ("tuned",) if trained else ("base",)}
    benchmark = config.benchmark.model_copy(update=models)
    made = benchmark_models(config.model_copy(update={"benchmark": benchmark}), trained)
    (answers,) = made.answers
    return Scored(name=name, suite=made.suite, answers=answers.model_copy(update={"model": name}))


def asked_from(config: PipelineConfig, trained: SnapshotRef | None) -> PipelineConfig:
    """The line, with training answers of the last round's adapter."""
    from tasks.training.stage import adapter_of

    adapter = str(adapter_of(trained)) if trained else None
    synthesis = config.synthesis.model_copy(update={"adapter": adapter})
    return config.model_copy(update={"synthesis": synthesis})


def taught_by(config: PipelineConfig, table: str) -> PipelineConfig:
    """The line, with training answers of a table."""
    told = {"sampler": "recorded", "responses": table, "tokenizer": config.training.base_model}
    return config.model_copy(update={"synthesis": config.synthesis.model_copy(update=told)})


def iterate(config: PipelineConfig, rounds: int, out: Path, taught: str | None = None) -> None:
    """Raises UsageError where a round's answers hold nothing to train on; results so far are
    written."""
    from prefect import flow

    from flows.refresh import refresh
    from flows.runtime.guard import guarding
    from flows.train import train_adapter

    @flow(name="expert iteration")
    def run() -> None:
        clock, found = Clock(), list[Scored]()
        trained: SnapshotRef | None = None
        with guarding(config.root), observed_by(clock):
            for number in range(rounds + 1):
                samples = None
                if number:
                    first = number == 1 and taught
                    line = taught_by(config, first) if first else asked_from(config, trained)
                    samples = refresh(line)
                    trained = train_adapter(line, samples.tasks, samples.curated)
                made = scored_by(config, f"round {number}" if number else "base", trained)
                seconds = clock.taken()
                snapshots = samples.snapshots if samples else {}
                more = {"seconds": seconds, "samples": snapshots, "gpus": len(visible_gpus())}
                found.append(made.model_copy(update=more))
                write_results(found, config, out)

    run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--profile", default=str(Path(__file__).with_name("profile.yaml")))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--taught", metavar="FILE")
    parser.add_argument("--out", type=Path, default=Path("real-results"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    try:
        config = load_profile(given.profile, given.set)
        require_ready(config, "refresh", "training", "benchmark")
        embed(config)
        with served_and_shown():
            iterate(config, given.rounds, given.out, given.taught)
    except EvalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
