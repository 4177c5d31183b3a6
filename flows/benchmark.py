"""Scoring models on held-out tasks: every model answers, every answer is verified like any candidate."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from flows.config import PipelineConfig
from flows.guard.notices import NOTICES
from flows.guard.run import guarded
from kernels_eval.records import Record
from tasks.benchmark.stage import Answers
from tasks.benchmark.step import score_benchmark
from tasks.policy import ProgressArtifact, call_stage
from tasks.progress import observed_by
from tasks.sources.step import load_tasks
from tasks.store import SnapshotRef
from tasks.synthesis.config import ServerConfig, SynthesisConfig
from tasks.synthesis.step import synthesise
from tasks.training.stage import adapter_of
from tasks.verification.step import verify


class Benchmarked(Record):
    """The suite, what each model answered, and the scores."""

    suite: SnapshotRef
    answers: tuple[Answers, ...]
    scores: SnapshotRef


@flow(name="benchmark the models", flow_run_name="benchmark {config.name}", **NOTICES)
def benchmark_models(config: PipelineConfig, trained: SnapshotRef | None = None) -> Benchmarked:
    """Exec, fast_p and pass@k of the recorded answers, the base model and the tuned one, on the same held-out tasks."""
    with guarded(config), observed_by(ProgressArtifact("benchmark-progress", "share of the current stage that is done")):
        suite = load_tasks(config.benchmark.tasks, config.root)
        answers = [_answer(config, suite, model, trained) for model in config.benchmark.models if model != "tuned" or trained]
        scores = call_stage(score_benchmark, answers, config.benchmark)
    return Benchmarked(suite=suite, answers=tuple(answers), scores=scores)


def _answer(config: PipelineConfig, suite: SnapshotRef, model: str, trained: SnapshotRef | None) -> Answers:
    adapter: Path | None = adapter_of(trained) if model == "tuned" and trained else None
    candidates = call_stage(synthesise, suite, synthesis_for(config, model), config.language, adapter)
    return Answers(model=model, candidates=candidates, verdicts=verify(candidates, suite, config.verification, config.language))


def synthesis_for(config: PipelineConfig, model: str) -> SynthesisConfig:
    """How a benchmark model is asked. `recorded` keeps the line's own sampler; base and tuned share model and sampling.

    Where the line's sampler is `vllm`, base and tuned are asked through servers with the same settings; otherwise in this process.
    """
    samples = {"samples_per_task": config.benchmark.samples_per_task}
    if model == "recorded":
        return SynthesisConfig(sampler="recorded", tokenizer=config.synthesis.tokenizer, hardware=config.synthesis.hardware, **samples)
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
