"""One branch of an ablation: curate, train, answer the benchmark, verify, score. Without a GPU, one
branch at a time times its kernels."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from filelock import FileLock, Timeout
from prefect import flow

from flows.ablation.records import HOME
from flows.benchmark import synthesis_for
from flows.config import PipelineConfig
from flows.confirm import judged_answers
from flows.train import prompts_for
from kernels_eval.records import Record
from tasks.benchmark.stage import Answers
from tasks.benchmark.step import score_benchmark
from tasks.curation.step import curate
from tasks.decontamination.deduplication import equal_kernels
from tasks.policy import call_stage
from tasks.samples import Samples
from tasks.store import Snapshot, SnapshotRef
from tasks.synthesis.stage import Synthesis
from tasks.synthesis.step import synthesise
from tasks.training import stage as training
from tasks.training.step import train

CPU_TIMING = threading.Lock()
"""Held while kernels are timed on the CPU, which another branch would slow down."""
log = logging.getLogger(__name__)


class Trained(Record):
    """What a branch made."""

    curated: SnapshotRef
    trained: SnapshotRef
    answers: Answers
    scores: SnapshotRef


@flow(name="ablation branch", flow_run_name="{name}", validate_parameters=False)
def run_branch(name: str, config: PipelineConfig, samples: Samples, suite: SnapshotRef) -> Trained:
    """Curate and train as `config` says, which is the branch's own, and benchmark the adapter."""
    equal = equal_kernels(config.deduplication)
    curated = call_stage(curate, samples, config.curation, equal)
    prompts = prompts_for(config, samples.tasks)
    with sole_maker(training.planned(curated, config.training, prompts)):
        trained = call_stage(train, curated, config.training, prompts)
    answers = answered(config, suite, "tuned", trained)
    scores = call_stage(score_benchmark, [answers], config.benchmark)
    return Trained(curated=curated, trained=trained, answers=answers, scores=scores)


def answered(
    config: PipelineConfig, suite: SnapshotRef, model: str, trained: SnapshotRef | None = None
) -> Answers:
    asked, language = synthesis_for(config, model), config.language
    adapter = training.adapter_of(trained) if trained else None
    with sole_maker(Synthesis(suite, asked, language, adapter).snapshot):
        candidates = call_stage(synthesise, suite, asked, language, adapter)
        with nullcontext() if language.needs_gpu else CPU_TIMING:
            verdicts = judged_answers(config, candidates, suite)
    return Answers(model=model, candidates=candidates, verdicts=verdicts)


@contextmanager
def sole_maker(planned: Snapshot) -> Iterator[None]:
    """Let one thread of one process make a snapshot; others log that they wait."""
    path = Path(planned.root) / HOME / "locks" / planned.fingerprint
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        log.warning("waiting: another branch or run makes the same (%s is held)", path)
        held = lock.acquire()
    with held:
        yield
