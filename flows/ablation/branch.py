"""One branch of an ablation: train on its rows, let the tuned model answer the benchmark, verify,
score.

Guarantees: what is finished is not done again; branches that give the same rows share one training
and one benchmark per seed, whichever comes first, also where two processes run ablations at once;
no two branches hold one GPU, and without GPUs models answer, and kernels are timed, one branch at a
time. Does not catch errors: a branch that fails raises, and the ablation records it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefect import flow

from flows.ablation.end import prefect_url
from flows.ablation.meter import Meter
from flows.ablation.records import HOME, alone_with
from flows.benchmark import synthesis_for
from flows.config import PipelineConfig
from kernels_eval.records import Record
from tasks.benchmark.stage import Answers
from tasks.benchmark.stage import planned as planned_scores
from tasks.benchmark.step import score_benchmark
from tasks.policy import call_stage
from tasks.store.snapshot import Snapshot, SnapshotRef
from tasks.synthesis.prompts import render
from tasks.synthesis.stage import Synthesis
from tasks.synthesis.step import synthesise
from tasks.training.stage import adapter_of, prompts_of
from tasks.training.stage import planned as planned_training
from tasks.training.step import train
from tasks.verification.stage import Verification
from tasks.verification.step import verify


class Trained(Record):
    """What a branch made."""

    trained: SnapshotRef
    answers: Answers
    scores: SnapshotRef


@dataclass
class Hands:
    """What the branches of one ablation share while they work. `gpus` is of the cluster, `share`
    what one branch may use of them."""

    meter: Meter
    gpus: int
    share: int
    in_process: bool
    """Models answer in this process, and not on servers."""
    stopped: threading.Event = field(default_factory=threading.Event)
    pages: dict[str, str | None] = field(default_factory=dict)
    """Of Prefect, by the name of the branch."""
    _answering: threading.Lock = field(default_factory=threading.Lock)
    _timing: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def training(self, workers: int) -> Iterator[None]:
        with self.meter.held("train", workers if self.gpus else 1):
            yield

    @contextmanager
    def answering(self) -> Iterator[None]:
        with (
            self._answering if self.in_process else nullcontext(),
            self.meter.held("answer", 1 if self.in_process else self.share),
        ):
            yield

    @contextmanager
    def verifying(self, needs_gpu: bool) -> Iterator[None]:
        with (
            nullcontext() if needs_gpu else self._timing,
            self.meter.held("verify", self.share if needs_gpu else 1),
        ):
            yield


HANDS: ContextVar[Hands] = ContextVar("concur_ablation_hands")
"""Of the ablation that the current thread works for. No parameter of a flow: Prefect would want to
store it."""


@flow(name="ablation branch", flow_run_name="{name}", validate_parameters=False)
def run_branch(
    name: str, config: PipelineConfig, tasks: SnapshotRef, curated: SnapshotRef, suite: SnapshotRef
) -> Trained:
    """Train on `curated` and benchmark the adapter: `config` is the branch's own, with its seed
    everywhere."""
    hands = HANDS.get()
    hands.pages[name] = prefect_url()
    prompts = prompts_of(tasks, config.language, render, config.synthesis.hardware)
    planned = planned_training(curated, config.training, prompts)
    with alone_with(Path(config.root) / HOME / "locks" / planned.fingerprint, hands.stopped):
        with _unless(planned, hands.training(config.training.workers)):
            trained = call_stage(train, curated, config.training, prompts)
        answers = answered(config, suite, "tuned", trained)
        scores = call_stage(score_benchmark, [answers], config.benchmark)
    return Trained(trained=trained, answers=answers, scores=scores)


def answered(
    config: PipelineConfig, suite: SnapshotRef, model: str, trained: SnapshotRef | None = None
) -> Answers:
    """What one model answers to the benchmark, verified. The devices are held only where something
    is left to do."""
    hands, language, asked = HANDS.get(), config.language, synthesis_for(config, model)
    adapter = adapter_of(trained) if trained else None
    holds = hands.answering() if asked.sampler != "recorded" else nullcontext()
    with _unless(Synthesis(suite, asked, language, adapter).snapshot, holds):
        candidates = call_stage(synthesise, suite, asked, language, adapter)
    with _unless(
        Verification(candidates, suite, config.verification, language).snapshot,
        hands.verifying(language.needs_gpu),
    ):
        verdicts = verify(candidates, suite, config.verification, language)
    return Answers(model=model, candidates=candidates, verdicts=verdicts)


def finished_branch(
    config: PipelineConfig, tasks: SnapshotRef, curated: SnapshotRef, suite: SnapshotRef
) -> Trained | None:
    """The same without doing anything: what the branch made in an earlier run, None where anything
    of it is left to do."""
    prompts = prompts_of(tasks, config.language, render, config.synthesis.hardware)
    trained = planned_training(curated, config.training, prompts)
    if not trained.finished:
        return None
    answers = finished_answers(config, suite, "tuned", trained.ref)
    if answers is None:
        return None
    scores = planned_scores([answers], config.benchmark)
    return (
        Trained(trained=trained.ref, answers=answers, scores=scores.ref)
        if scores.finished
        else None
    )


def finished_answers(
    config: PipelineConfig, suite: SnapshotRef, model: str, trained: SnapshotRef | None = None
) -> Answers | None:
    """A model's verified answers where they are there already."""
    adapter = adapter_of(trained) if trained else None
    candidates = Synthesis(suite, synthesis_for(config, model), config.language, adapter).snapshot
    if not candidates.finished:
        return None
    verdicts = Verification(candidates.ref, suite, config.verification, config.language).snapshot
    return (
        Answers(model=model, candidates=candidates.ref, verdicts=verdicts.ref)
        if verdicts.finished
        else None
    )


def leader_among(
    sets: Sequence[SnapshotRef], config: PipelineConfig, tasks: SnapshotRef
) -> SnapshotRef:
    """Of curated sets that hold the same rows, the one to train on: one that was trained on
    already, else one that was begun, else the first."""
    prompts = prompts_of(tasks, config.language, render, config.synthesis.hardware)
    planned = [(planned_training(each, config.training, prompts), each) for each in sets]
    done = [each for snapshot, each in planned if snapshot.finished]
    begun = [each for snapshot, each in planned if (Path(snapshot.path) / "checkpoints").is_dir()]
    return (*done, *begun, *sets)[0]


@contextmanager
def _unless(snapshot: Snapshot, holds: Any) -> Iterator[None]:
    """Inside `holds`, unless there is nothing to do."""
    with nullcontext() if snapshot.finished else holds:
        yield
