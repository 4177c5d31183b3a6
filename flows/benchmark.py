"""Scores of models on held-out tasks; their answers are verified like any candidate."""

from __future__ import annotations

from flows.config import PipelineConfig
from flows.confirm import judged_answers
from flows.runtime.guard import optional
from kernels_eval.records import Record
from tasks.benchmark.stage import Answers
from tasks.benchmark.step import score_benchmark
from tasks.policy import call_stage
from tasks.sources.step import load_tasks
from tasks.store.snapshot import SnapshotRef
from tasks.synthesis.config import ServerConfig, SynthesisConfig
from tasks.synthesis.step import synthesise
from tasks.training.stage import adapter_of
from tasks.workload.step import measure_workloads


class Benchmarked(Record):
    """The suite, what each model answered, and the scores. `workloads` (what the suite's tasks
    compute) is None where counting failed; `cautions` then say why.
    """

    suite: SnapshotRef
    answers: tuple[Answers, ...]
    scores: SnapshotRef
    workloads: SnapshotRef | None = None
    cautions: tuple[str, ...] = ()


def benchmark_models(config: PipelineConfig, trained: SnapshotRef | None = None) -> Benchmarked:
    """Exec, fast_p and pass@k of the recorded answers, the base model and the tuned one, on the
    same held-out tasks."""
    suite = call_stage(load_tasks, config.benchmark.tasks, config.root)
    answers = tuple(
        _answer(config, suite, model, trained)
        for model in config.benchmark.models
        if model != "tuned" or trained
    )
    scores = call_stage(score_benchmark, list(answers), config.benchmark)
    # scores are published without these, too: no sandbox, say
    workloads, cautions = optional(
        "Scores by kind and family of operator", call_stage, measure_workloads, suite
    )
    return Benchmarked(
        suite=suite,
        answers=answers,
        scores=scores,
        workloads=workloads,
        cautions=cautions,
    )


def _answer(
    config: PipelineConfig, suite: SnapshotRef, model: str, trained: SnapshotRef | None
) -> Answers:
    adapter = adapter_of(trained) if model == "tuned" and trained else None
    asked = synthesis_for(config, model)
    candidates = call_stage(synthesise, suite, asked, config.language, adapter)
    verdicts = judged_answers(config, candidates, suite)
    return Answers(model=model, candidates=candidates, verdicts=verdicts)


def synthesis_for(config: PipelineConfig, model: str) -> SynthesisConfig:
    """How a benchmark model is sampled: `recorded` by the line's sampler, base and tuned by vLLM
    servers if the line uses `vllm`, else in this process."""
    own = config.synthesis
    samples = {
        "samples_per_task": config.benchmark.samples_per_task,
        "hardware": own.hardware,
    }
    if model == "recorded":
        return SynthesisConfig(sampler="recorded", tokenizer=own.tokenizer, **samples)
    served = own.sampler == "vllm"
    return SynthesisConfig(
        sampler="vllm" if served else "transformers",
        model=config.training.base_model,
        tokenizer=config.training.base_model,
        sampling=config.benchmark.sampling,
        server=own.server if served else ServerConfig(),
        **samples,
    )
