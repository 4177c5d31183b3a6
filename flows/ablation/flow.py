"""`concur ablate`: strategies x sizes x seeds on the same samples, curated, trained and benchmarked
side by side. Rerunning retries failed branches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from prefect import flow
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger

from flows.ablation.branch import answered
from flows.ablation.branches import Branches, Job, run_page
from flows.ablation.plan import (
    AblationConfig,
    Plan,
    branch_pipeline,
    branches_at_once,
    pipeline_of,
    planned_branches,
    visible_gpus,
)
from flows.ablation.records import ablation_dir, sole_writer, write_text
from flows.ablation.results import cautions_of, results_of
from flows.ablation.samples import fingerprint_of, samples_of
from flows.ablation.track import AblationTracker
from flows.artifacts import create_markdown_artifact, create_table_artifact
from flows.config import PipelineConfig
from flows.confirm import confirmed_samples
from flows.naming import run_name
from flows.refresh import verified_samples
from flows.runtime.guard import guarding, optional
from kernels_eval.errors import UsageError
from kernels_eval.records import Json, Record
from tasks.benchmark.comparison.records import Ablation
from tasks.curation.config import CurationConfig
from tasks.curation.step import curate
from tasks.decontamination.deduplication import equal_kernels
from tasks.policy import call_stage
from tasks.progress import report
from tasks.samples import Samples
from tasks.sources.step import load_tasks
from tasks.store import SnapshotRef


class AblationResult(Record):
    """An ablation as far as it came, and where it is. `finding` is the comparison's first sentence;
    `new` are the branches that ran in this call."""

    ablation: Ablation
    strategies: tuple[Json, ...]
    directory: str
    comparison: str | None
    finding: str | None
    mlflow_run: str | None
    new: tuple[str, ...]

    @property
    def complete(self) -> bool:
        return all(branch.state == "done" for branch in self.ablation.branches)


@flow(name="ablation", flow_run_name=run_name("ablate"))
def ablate(config: AblationConfig | None = None) -> AblationResult:
    """Which strategy makes the best training set, at which size, and how sure that is: every branch
    is curated, trained and benchmarked.

    A branch that fails is a caution. Rerun with the same parameters to resume. Raises UsageError
    for branches or verdicts that cannot be used.
    """
    config = config or AblationConfig()
    pipeline = pipeline_of(config)
    plans = planned_branches(config, pipeline.curation)
    samples = None
    if config.verdicts:
        language, samples = samples_of(pipeline.root, config.verdicts)
        pipeline = pipeline.model_copy(update={"language": language})
    with guarding(pipeline.root):
        suite = call_stage(load_tasks, pipeline.benchmark.tasks, pipeline.root)
        report("ablation", 0, len(plans), scored_on(pipeline, suite))
        samples = samples or verified_samples(pipeline)
        fingerprint = fingerprint_of(pipeline, plans, samples, suite)
        directory = ablation_dir(pipeline.root, fingerprint)
        with sole_writer(directory):
            tracker = AblationTracker(pipeline, fingerprint, get_run_logger().error)
            gpus = visible_gpus(pipeline)
            parallel = branches_at_once(config, pipeline, gpus)
            share = max(1, gpus // parallel) if gpus else None
            jobs = jobs_of(pipeline, plans, samples, share)
            branches = Branches(jobs, suite, directory, tracker)
            return _run(pipeline, branches, parallel, fingerprint)


def jobs_of(
    pipeline: PipelineConfig, plans: Sequence[Plan], samples: Samples, share: int | None
) -> list[Job]:
    """A job for each plan, its samples confirmed by its own rule alone, as a refresh does.

    Without a size a strategy takes as many samples as concur's branch with the same keys. By itself
    it would count concur's set by its own verdicts, and confirming moves speedups.
    """
    equal = equal_kernels(pipeline.deduplication)
    sizes: dict[CurationConfig, int] = {}
    jobs: dict[str, Job] = {}
    for plan in sorted(plans, key=lambda each: each.curation.strategy != "concur"):
        like = plan.curation.model_copy(update={"strategy": "concur"})
        size = plan.curation.size or sizes.get(like)
        rule = plan.curation.model_copy(update={"size": size})
        own = confirmed_samples(pipeline, samples, [rule])
        if rule == like:
            with suppress(UsageError):  # its branch says so
                sizes[like] = call_stage(curate, own, rule, equal).open().manifest["rows"]
        sized = plan.model_copy(update={"curation": rule})
        jobs[plan.name] = Job(plan, branch_pipeline(pipeline, sized, share=share), own)
    return [jobs[plan.name] for plan in plans]


def _run(
    pipeline: PipelineConfig, branches: Branches, parallel: int, fingerprint: str
) -> AblationResult:
    tracker, plans = branches.tracker, [job.plan for job in branches.jobs]
    tracker.open(plans)
    shared = [model for model in pipeline.benchmark.models if model != "tuned"]
    references = tuple(answered(pipeline, branches.suite, model) for model in shared)
    branches.run(parallel)
    ablation = Ablation(
        name=pipeline.name,
        fingerprint=fingerprint,
        branches=tuple(
            branch.model_copy(update={"mlflow_url": tracker.url(branch.name)})
            for branch in branches.in_order
        ),
        base_model=pipeline.training.base_model,
        references=references,
        baseline=plans[0].strategy,
        min_kernel_share=pipeline.benchmark.min_kernel_share,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        cautions=cautions_of(branches.in_order),
        mlflow_url=tracker.url(),
        prefect_url=_own_page(),
    )
    return _publish(ablation, branches)


def _publish(ablation: Ablation, branches: Branches) -> AblationResult:
    directory, tracker = branches.directory, branches.tracker
    summary = directory / "ablation.json"
    write_text(summary, ablation.model_dump_json(indent=2))
    made, missing = optional("The results", results_of, ablation, directory)
    strategies, files = made or ([], [])
    tracker.close(ablation.branches, strategies, [summary, *files])
    if strategies:
        title = "Strategies against the first"
        create_table_artifact("ablation", strategies, title)
    pages: dict[str, Path] = {path.suffix: path for path in files}
    if page := pages.get(".md"):
        text = page.read_text(encoding="utf-8")
        create_markdown_artifact("comparison", text, "Which strategy won")
    told = json.loads(pages[".json"].read_text(encoding="utf-8")) if ".json" in pages else {}
    cautions = (*ablation.cautions, *missing, *tracker.failures)
    return AblationResult(
        ablation=ablation.model_copy(update={"cautions": cautions}),
        strategies=tuple(strategies),
        directory=str(directory),
        comparison=str(pages[".html"]) if ".html" in pages else None,
        finding=told.get("headline"),
        mlflow_run=tracker.run_id,
        new=tuple(branches.new),
    )


def scored_on(pipeline: PipelineConfig, suite: SnapshotRef) -> str:
    tasks = pipeline.benchmark.tasks
    place = " ".join(filter(None, (tasks.source, tasks.location)))
    count = suite.open().manifest["rows"]
    return f"scored on {count:,} held-out tasks: {place} (benchmark.tasks)"


def _own_page() -> str | None:
    context = FlowRunContext.get()
    flow_run = context.flow_run if context else None
    return run_page(flow_run.id) if flow_run else None
