"""One branch of an ablation: train on its rows, let the tuned model answer the benchmark, verify,
score.

Guarantees: what is finished is not done again; branches that give the same rows share one training
and one benchmark per seed, whichever comes first, also where two processes run ablations at once;
the base model's answers are made once, too; no two branches hold one GPU, and without GPUs models
answer, and kernels are timed, one branch at a time. Does not catch errors: a branch that fails
raises, and the ablation records it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from prefect import flow
from prefect.context import FlowRunContext

from flows.ablation.records import HOME, Meter, alone_with
from flows.benchmark import synthesis_for
from flows.config import PipelineConfig
from flows.train import prompts_for
from kernels_eval.records import Record
from tasks.benchmark.stage import Answers
from tasks.benchmark.stage import planned as planned_scores
from tasks.benchmark.step import score_benchmark
from tasks.policy import call_stage
from tasks.store import Snapshot, SnapshotRef
from tasks.synthesis.stage import Synthesis
from tasks.synthesis.step import synthesise
from tasks.training import stage as training
from tasks.training.step import train
from tasks.verification.stage import Verification
from tasks.verification.step import verify


class Trained(Record):
    """What a branch made."""

    trained: SnapshotRef
    answers: Answers
    scores: SnapshotRef


@dataclass
class SharedResources:
    """What the branches of one ablation share while they work. `gpus` is of the cluster, `share`
    what one branch may use of them."""

    meter: Meter
    gpus: int
    share: int
    in_process: bool
    """Models answer in this process, and not on servers."""
    stopped: threading.Event = field(default_factory=threading.Event)
    pages: dict[str, str | None] = field(default_factory=dict)
    """Pages in Prefect, by the name of the branch."""
    _answering: threading.Lock = field(default_factory=threading.Lock)
    _timing: threading.Lock = field(default_factory=threading.Lock)

    def training(self, workers: int) -> AbstractContextManager[None]:
        """Hold the devices of a training. It waits for models that answer on a GPU in this process,
        of which Ray does not know."""
        lock = self._answering if self.in_process and self.gpus else None
        return self._held("train", lock, workers if self.gpus else 1)

    def answering(self) -> AbstractContextManager[None]:
        """Hold what answers the benchmark."""
        return self._held("answer", self._answering if self.in_process else None)

    def verifying(self, needs_gpu: bool) -> AbstractContextManager[None]:
        """Hold what verifies answers."""
        return self._held("verify", None if needs_gpu else self._timing)

    @contextmanager
    def _held(
        self, phase: str, lock: threading.Lock | None, devices: int | None = None
    ) -> Iterator[None]:
        """Hold so many devices: by default one that only one branch may use at a time (its lock),
        else the share of a branch."""
        count = devices or (1 if lock else self.share)
        with lock or nullcontext(), self.meter.held(phase, count):
            yield


RESOURCES: ContextVar[SharedResources] = ContextVar("concur_ablation_resources")
"""Those of the ablation that the current thread works for. No parameter of a flow: Prefect would
store it."""


def planned_training(config: PipelineConfig, tasks: SnapshotRef, curated: SnapshotRef) -> Snapshot:
    """The training snapshot of a branch, finished or not."""
    return training.planned(curated, config.training, prompts_for(config, tasks))


def planned_answers(
    config: PipelineConfig, suite: SnapshotRef, model: str, trained: SnapshotRef | None = None
) -> tuple[Synthesis, Answers]:
    """What one model answers to the benchmark and the verdicts on it, finished or not."""
    adapter = training.adapter_of(trained) if trained else None
    asked = Synthesis(suite, synthesis_for(config, model), config.language, adapter)
    candidates = asked.snapshot.ref
    judged = Verification(candidates, suite, config.verification, config.language).snapshot
    return asked, Answers(model=model, candidates=candidates, verdicts=judged.ref)


@flow(name="ablation branch", flow_run_name="{name}", validate_parameters=False)
def run_branch(
    name: str, config: PipelineConfig, tasks: SnapshotRef, curated: SnapshotRef, suite: SnapshotRef
) -> Trained:
    """Train on `curated` and benchmark the adapter: `config` is the branch's own, with its seed
    everywhere."""
    resources = RESOURCES.get()
    resources.pages[name] = prefect_url()
    planned = planned_training(config, tasks, curated)
    with _alone(config, planned):
        with _unless_finished(planned, resources.training(config.training.workers)):
            trained = call_stage(train, curated, config.training, prompts_for(config, tasks))
        answers = answered(config, suite, "tuned", trained)
        scores = call_stage(score_benchmark, [answers], config.benchmark)
    return Trained(trained=trained, answers=answers, scores=scores)


def answered(
    config: PipelineConfig, suite: SnapshotRef, model: str, trained: SnapshotRef | None = None
) -> Answers:
    """What one model answers to the benchmark, verified, by one process at a time. Devices are held
    only where something is left to do."""
    resources, language = RESOURCES.get(), config.language
    asked, answers = planned_answers(config, suite, model, trained)
    held = nullcontext() if asked.config.sampler == "recorded" else resources.answering()
    with _alone(config, asked.snapshot):
        with _unless_finished(asked.snapshot, held):
            candidates = call_stage(synthesise, suite, asked.config, language, asked.adapter)
        with _unless_finished(answers.verdicts.open(), resources.verifying(language.needs_gpu)):
            call_stage(verify, candidates, suite, config.verification, language)
    return answers


def finished_branch(
    config: PipelineConfig, tasks: SnapshotRef, curated: SnapshotRef, suite: SnapshotRef
) -> Trained | None:
    """What a branch made in an earlier run; None where anything of it is left to do."""
    trained = planned_training(config, tasks, curated)
    if not trained.finished:
        return None
    answers = finished_answers(config, suite, "tuned", trained.ref)
    if answers is None:
        return None
    scores = planned_scores([answers], config.benchmark)
    found = Trained(trained=trained.ref, answers=answers, scores=scores.ref)
    return found if scores.finished else None


def finished_answers(
    config: PipelineConfig, suite: SnapshotRef, model: str, trained: SnapshotRef | None = None
) -> Answers | None:
    """A model's verified answers; None where they are not all there."""
    _, answers = planned_answers(config, suite, model, trained)
    done = answers.candidates.open().finished and answers.verdicts.open().finished
    return answers if done else None


def leader_among(
    sets: Sequence[SnapshotRef], config: PipelineConfig, tasks: SnapshotRef
) -> SnapshotRef:
    """Of curated sets that hold the same rows, the one to train on: one that was trained on
    already, else one that was begun, else the first."""
    planned = [(planned_training(config, tasks, each), each) for each in sets]
    done = [each for snapshot, each in planned if snapshot.finished]
    begun = [each for snapshot, each in planned if (Path(snapshot.path) / "checkpoints").is_dir()]
    return (*done, *begun, *sets)[0]


def _alone(config: PipelineConfig, planned: Snapshot) -> AbstractContextManager[None]:
    """Hold the lock of what is made, among all ablations under the root."""
    path = Path(config.root) / HOME / "locks" / planned.fingerprint
    return alone_with(path, RESOURCES.get().stopped)


@contextmanager
def _unless_finished(snapshot: Snapshot, held: AbstractContextManager[None]) -> Iterator[None]:
    """Hold something, unless there is nothing to do."""
    with nullcontext() if snapshot.finished else held:
        yield


def prefect_url() -> str | None:
    """The page of the flow run that this thread works for, where Prefect is a server that says
    where its pages are."""
    from prefect.settings import get_current_settings
    from prefect.utilities.urls import url_for

    context = FlowRunContext.get()
    if context is None or context.flow_run is None or not get_current_settings().api.url:
        return None
    return url_for(context.flow_run)
