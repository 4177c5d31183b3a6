"""Scoring models on held-out tasks: every model answers, every answer is verified like any
candidate."""

from __future__ import annotations

from pathlib import Path

from prefect import flow
from prefect.logging import get_run_logger

from flows.config import PipelineConfig
from flows.naming import run_name
from flows.runtime.guard import guarded
from flows.runtime.notices import NOTICES
from kernels_eval.devices import conditions
from kernels_eval.records import Record
from tasks.benchmark.stage import Answers
from tasks.benchmark.step import score_benchmark
from tasks.policy import ProgressArtifact, call_stage
from tasks.progress import observed_by
from tasks.sources.step import load_tasks
from tasks.store.snapshot import SnapshotRef
from tasks.synthesis.config import ServerConfig, SynthesisConfig
from tasks.synthesis.step import synthesise
from tasks.training.stage import adapter_of
from tasks.verification.step import verify
from tasks.workload.config import ProfilingConfig
from tasks.workload.step import measure_workloads, profile_references


class Benchmarked(Record):
    """The suite, what each model answered, the scores, and where the references spend their time
    (None where that is not asked for). `workloads` (what the suite's tasks compute) is None where
    counting failed; `cautions` then say why.
    """

    suite: SnapshotRef
    answers: tuple[Answers, ...]
    scores: SnapshotRef
    profiles: SnapshotRef | None = None
    workloads: SnapshotRef | None = None
    cautions: tuple[str, ...] = ()


@flow(name="benchmark the models", flow_run_name=run_name("benchmark", strategy=False), **NOTICES)
def benchmark_models(config: PipelineConfig, trained: SnapshotRef | None = None) -> Benchmarked:
    """Exec, fast_p and pass@k of the recorded answers, the base model and the tuned one, on the
    same held-out tasks."""
    with (
        guarded(config),
        observed_by(
            ProgressArtifact("benchmark-progress", "share of the current stage that is done")
        ),
    ):
        suite = load_tasks(config.benchmark.tasks, config.root)
        answers = [
            _answer(config, suite, model, trained)
            for model in config.benchmark.models
            if model != "tuned" or trained
        ]
        scores = call_stage(score_benchmark, answers, config.benchmark)
        profiles = _profiles(config, suite) if config.benchmark.operator_times else None
        workloads, cautions = _counted(config, suite)
    made = {"suite": suite, "answers": tuple(answers), "scores": scores, "profiles": profiles}
    return Benchmarked(**made, workloads=workloads, cautions=cautions)


def _profiles(config: PipelineConfig, suite: SnapshotRef) -> SnapshotRef:
    asked = ProfilingConfig(threads=config.verification.eval.threads)
    device = "cuda:0" if config.language.needs_gpu else "cpu"
    return call_stage(profile_references, suite, asked, device, conditions(config.language).device)


def _counted(
    config: PipelineConfig, suite: SnapshotRef
) -> tuple[SnapshotRef | None, tuple[str, ...]]:
    """What the suite's tasks compute, by which the report groups them, or why it does not: scores
    are not given up for a table of them."""
    try:
        return call_stage(measure_workloads, suite, config.workload), ()
    except (
        Exception
    ) as error:  # no sandbox, say; the next run of the same configuration tries it again
        caution = (
            f"Scores by kind and family of operator are missing: {type(error).__name__}: {error}"
        )
        get_run_logger().error("%s", caution)
        return None, (caution,)


def _answer(
    config: PipelineConfig, suite: SnapshotRef, model: str, trained: SnapshotRef | None
) -> Answers:
    adapter: Path | None = adapter_of(trained) if model == "tuned" and trained else None
    candidates = call_stage(
        synthesise, suite, synthesis_for(config, model), config.language, adapter
    )
    return Answers(
        model=model,
        candidates=candidates,
        verdicts=verify(candidates, suite, config.verification, config.language),
    )


def synthesis_for(config: PipelineConfig, model: str) -> SynthesisConfig:
    """How a benchmark model is asked. `recorded` keeps the line's own sampler; base and tuned share
    model and sampling.

    Where the line's sampler is `vllm`, base and tuned are asked through servers with the same
    settings; otherwise in this process.
    """
    samples = {"samples_per_task": config.benchmark.samples_per_task}
    if model == "recorded":
        return SynthesisConfig(
            sampler="recorded",
            tokenizer=config.synthesis.tokenizer,
            hardware=config.synthesis.hardware,
            **samples,
        )
    served = config.synthesis.sampler == "vllm"
    return SynthesisConfig(
        sampler="vllm" if served else "transformers",
        model=config.training.base_model,
        tokenizer=config.training.base_model,
        sampling=config.benchmark.sampling,
        hardware=config.synthesis.hardware,
        server=config.synthesis.server if served else ServerConfig(),
        **samples,
    )
