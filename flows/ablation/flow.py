"""`concur ablate`: strategies x sizes x seeds on the same samples, each curated, trained and
benchmarked; one flow, branches side by side.

Guarantees: the refresh, the base model's and recorded answers are done once; finished work is not
done again, whatever was killed; a branch that fails is what the same command does next time.
Failures of the refresh or of the shared answers end the ablation: no branch could do without.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from prefect import flow
from prefect.logging import get_run_logger

from flows.ablation.branch import RESOURCES, SharedResources, answered, prefect_url
from flows.ablation.branches import Branches
from flows.ablation.estimate import Estimate, estimate, require_within
from flows.ablation.plan import (
    AblationConfig,
    Plan,
    branches_at_once,
    pipeline_of,
    planned_branches,
    visible_gpus,
)
from flows.ablation.records import Meter, ablation_dir, sole_writer, write_text
from flows.ablation.results import cautions_of, compared, strategy_rows
from flows.ablation.samples import (
    fingerprint_of,
    finished_samples,
    finished_tasks,
    samples_of,
    work_left,
)
from flows.ablation.track import AblationTracker
from flows.artifacts import create_markdown_artifact, create_table_artifact
from flows.config import PipelineConfig
from flows.naming import ablation_name
from flows.refresh import verified_samples
from flows.runtime.guard import checking
from flows.runtime.root_lock import in_use
from flows.runtime.shutdown import stops_soon
from kernels_eval.records import Json, Record
from tasks.benchmark.comparison.records import Ablation
from tasks.policy import call_stage
from tasks.progress import observed_by
from tasks.samples import Samples
from tasks.sources import stage as sources
from tasks.sources.step import load_tasks
from tasks.store import SnapshotRef


class AblationResult(Record):
    """An ablation as far as it came, and where it is. `new` are the branches that anything was done
    for in this run."""

    ablation: Ablation
    strategies: tuple[Json, ...]
    estimate: Estimate
    gpu_hours: float
    directory: str
    comparison: str | None
    mlflow_run: str | None
    new: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether every branch is done."""
        return all(branch.state == "done" for branch in self.ablation.branches)


@dataclass(frozen=True)
class Setup:
    """An ablation's pipeline, its branches and its devices. `samples` is None where they are still
    to be made; `suite` is the benchmark's tasks."""

    pipeline: PipelineConfig
    plans: tuple[Plan, ...]
    gpus: int
    parallel: int
    samples: Samples | None
    suite: SnapshotRef

    def estimate(self) -> Estimate:
        """What is left to do, in device time. Reads snapshots, and task sources where there are no
        samples."""
        tasks = 0
        if self.samples is None:
            pipeline = self.pipeline
            ref = finished_tasks(pipeline) or sources.run(pipeline.tasks, pipeline.root)
            tasks = ref.open().manifest["rows"]
        work = work_left(self.pipeline, self.plans, self.samples, self.suite, tasks)
        return estimate(self.pipeline, work, gpus=self.gpus, parallel=self.parallel)


def set_up(config: AblationConfig, pipeline: PipelineConfig) -> Setup:
    """Find the samples where they exist. Does nothing but read snapshots and task sources. Raises
    UsageError for branches or verdicts that cannot be used."""
    plans, gpus = planned_branches(config), visible_gpus(pipeline)
    parallel = branches_at_once(config, pipeline, gpus)
    samples: Samples | None
    if config.verdicts:
        language, samples = samples_of(pipeline.root, config.verdicts)
        pipeline = pipeline.model_copy(update={"language": language})
    else:
        samples = finished_samples(pipeline)
    suite = sources.run(pipeline.benchmark.tasks, pipeline.root)
    return Setup(pipeline, plans, gpus, parallel, samples, suite)


@flow(name="ablation", flow_run_name=ablation_name)
def ablate(config: AblationConfig | None = None) -> AblationResult:
    """Which strategy makes the best training set, at which size, and how sure that is: every branch
    is curated, trained and benchmarked.

    A branch that fails is a caution. Rerun with the same parameters to resume. Raises UsageError
    before anything costly where the estimate is above the budget.
    """
    config = config or AblationConfig()
    setup = set_up(config, pipeline_of(config))
    pipeline, samples, meter = setup.pipeline, setup.samples, Meter(config.max_gpu_hours)
    resources = SharedResources(
        meter,
        setup.gpus,
        share=max(1, setup.gpus // setup.parallel),
        in_process=pipeline.synthesis.sampler != "vllm",
    )
    RESOURCES.set(resources)
    with stops_soon(), in_use(pipeline.root), checking(pipeline.guarded):
        if samples is None:  # else the sets are counted first, which costs next to nothing
            require_within(setup.estimate(), config.max_gpu_hours)
        suite = call_stage(load_tasks, pipeline.benchmark.tasks, pipeline.root)
        if samples is None:
            with meter.held("refresh", setup.gpus or 1):
                samples = verified_samples(pipeline)
        fingerprint = fingerprint_of(pipeline, setup.plans, samples, suite)
        directory = ablation_dir(pipeline.root, fingerprint)
        with sole_writer(directory), observed_by(lambda *_: meter.save()):
            setup = replace(setup, samples=samples, suite=suite)
            tracker = AblationTracker(pipeline, fingerprint, get_run_logger().error)
            branches = Branches(
                pipeline, setup.plans, samples, suite, resources, directory, tracker
            )
            return _run(setup, branches, fingerprint)


def _run(setup: Setup, branches: Branches, fingerprint: str) -> AblationResult:
    """Run the branches. A call that resumes does not hold its estimate against the budget: an
    earlier one did, and what is left of it is used up now."""
    pipeline, meter, tracker = setup.pipeline, branches.meter, branches.tracker
    resumed = meter.keep_in(branches.directory)
    branches.curate_all()
    left = setup.estimate()
    if not resumed:
        require_within(left, meter.budget, meter.gpu_hours)
    create_markdown_artifact("ablation-estimate", "\n".join(left.lines()), "What is left to do")
    tracker.open(setup.plans)
    models = [model for model in pipeline.benchmark.models if model != "tuned"]
    references = tuple(answered(pipeline, setup.suite, model) for model in models)
    branches.run(setup.parallel, left.each_branch_s)
    ended = [record.branch for _, record in branches.ended]
    ablation = Ablation(
        name=pipeline.name,
        fingerprint=fingerprint,
        branches=tuple(
            branch.model_copy(update={"mlflow_url": tracker.url(branch.name)}) for branch in ended
        ),
        base_model=pipeline.training.base_model,
        references=references,
        baseline=setup.plans[0].strategy,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        cautions=cautions_of(ended),
        mlflow_url=tracker.url(),
        prefect_url=prefect_url(),
    )
    return _publish(ablation, branches, left, pipeline.benchmark.resamples)


def _publish(
    ablation: Ablation, branches: Branches, left: Estimate, resamples: int
) -> AblationResult:
    """Write the comparison beside the records, to MLflow and to Prefect."""
    directory, tracker, spent = branches.directory, branches.tracker, branches.meter.gpu_hours
    summary = directory / "sweep.json"
    write_text(summary, ablation.model_dump_json(indent=2))
    files, caution = compared(ablation, directory, resamples)
    rows = strategy_rows(ablation.branches, resamples)
    tracker.close([record for _, record in branches.ended], rows, [summary, *files], spent)
    if rows:
        title = "Strategies, with 95 % intervals, against the first"
        create_table_artifact("ablation", rows, title)
    pages: dict[str, Path] = {path.suffix: path for path in files}
    if page := pages.get(".md"):
        text = page.read_text(encoding="utf-8")
        create_markdown_artifact("comparison", text, "Which strategy won")
    branches.show_progress([])
    cautions = (*ablation.cautions, *caution, *tracker.failures)
    return AblationResult(
        ablation=ablation.model_copy(update={"cautions": cautions}),
        strategies=tuple(rows),
        estimate=left,
        gpu_hours=round(spent, 6),
        directory=str(directory),
        comparison=str(pages[".html"]) if ".html" in pages else None,
        mlflow_run=tracker.run_id,
        new=tuple(job.name for job in branches.jobs if job.new),
    )
