"""`concur ablate`: strategies x sizes x seeds on the same samples, each curated, trained and
benchmarked; one flow, branches side by side.

Guarantees: the refresh, the base model's and recorded answers are done once; finished work is not
done again, whatever was killed; branches of the same rows and seed share one training; a branch
that fails stops no other, is recorded with its error, and is what the same command does next time;
no branch begins that the budget does not hold. Does not guarantee that the budget is never
exceeded: what is begun is finished, and an estimate can be wrong. Failures of the refresh or of the
shared answers end the ablation: no branch could do without.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import fmean
from typing import Any, cast
from uuid import UUID

from prefect import flow
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.logging import get_run_logger

from flows.ablation.branch import (
    RESOURCES,
    SharedResources,
    Trained,
    answered,
    finished_branch,
    leader_among,
    prefect_url,
    run_branch,
)
from flows.ablation.estimate import Estimate, estimate, require_within
from flows.ablation.plan import (
    AblationConfig,
    Plan,
    branch_pipeline,
    branches_at_once,
    pipeline_of,
    planned_branches,
    visible_gpus,
)
from flows.ablation.records import (
    BRANCH,
    BranchRecord,
    Meter,
    ablation_dir,
    hours,
    load_record,
    save_record,
    sole_writer,
    write_text,
)
from flows.ablation.results import cautions_of, compared, one_line, strategy_rows
from flows.ablation.samples import (
    content_of,
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
from flows.refresh import Samples, verified_samples
from flows.runtime.root_lock import in_use
from flows.runtime.shutdown import stops_soon
from kernels_eval.cluster.ray import start_ray
from kernels_eval.records import Record
from tasks.benchmark.comparison.records import Ablation, Branch, BranchState
from tasks.curation.step import curate
from tasks.policy import call_stage
from tasks.progress import observed_by, report
from tasks.reporting.text import cells
from tasks.sources import stage as sources
from tasks.sources.step import load_tasks
from tasks.store import SnapshotRef
from tasks.tracking.stages import training_headline

TICK_S = 2.0
ENDED = "ablation"
"""The name under which ended branches are reported to `tasks.progress`."""
Results = SimpleQueue[tuple[Plan, Trained | BaseException]]


class AblationResult(Record):
    """An ablation as far as it came, and where it is. `new` are the branches that anything was done
    for in this run."""

    ablation: Ablation
    strategies: tuple[dict[str, Any], ...]
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
    """An ablation's configuration, its branches and its devices. `samples` is None where they are
    still to be made; `suite` is the benchmark's tasks."""

    config: AblationConfig
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
            ref = finished_tasks(self.pipeline) or sources.run(
                self.pipeline.tasks, self.pipeline.root
            )
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
    return Setup(config, pipeline, plans, gpus, parallel, samples, suite)


@flow(name="ablation", flow_run_name=ablation_name)
def ablate(config: AblationConfig | None = None) -> AblationResult:
    """Which strategy makes the best training set, at which size, and how sure that is: every branch
    is curated, trained and benchmarked.

    A branch that fails is a caution. Rerun with the same parameters to resume. Raises UsageError
    before anything costly where the estimate is above the budget.
    """
    config = config or AblationConfig()
    setup = set_up(config, pipeline_of(config))
    pipeline, samples = setup.pipeline, setup.samples
    meter = Meter(config.max_gpu_hours)
    resources = SharedResources(
        meter,
        setup.gpus,
        share=max(1, setup.gpus // setup.parallel),
        in_process=pipeline.synthesis.sampler != "vllm",
    )
    RESOURCES.set(resources)
    if samples is None:  # else the sets are counted first, which costs next to nothing
        require_within(setup.estimate(), config.max_gpu_hours)
    setup = replace(setup, suite=load_tasks(pipeline.benchmark.tasks, pipeline.root))
    if samples is None:
        with meter.held("refresh", setup.gpus or 1):
            samples = verified_samples(pipeline)
        setup = replace(setup, samples=samples)
    fingerprint = fingerprint_of(config, pipeline, setup.plans, samples, setup.suite)
    directory = ablation_dir(pipeline.root, fingerprint)
    with (
        stops_soon(),
        in_use(pipeline.root),
        sole_writer(directory),
        observed_by(lambda *_: meter.save()),
    ):
        resumed = meter.keep_in(directory)
        return AblationRun(setup, samples, resources, fingerprint, directory).run(resumed)


class AblationRun:
    """One call of an ablation whose samples exist."""

    def __init__(
        self,
        setup: Setup,
        samples: Samples,
        resources: SharedResources,
        fingerprint: str,
        directory: Path,
    ) -> None:
        self.setup, self.samples, self.resources = setup, samples, resources
        self.config, self.pipeline, self.plans = setup.config, setup.pipeline, setup.plans
        self.meter, self.fingerprint, self.directory = resources.meter, fingerprint, directory
        self.log = get_run_logger()
        self.tracker = AblationTracker(self.pipeline, fingerprint, self.log.error)
        share = resources.share if resources.gpus else None
        self.own = {
            plan.name: branch_pipeline(self.pipeline, plan, share=share) for plan in self.plans
        }
        self.curated: dict[str, SnapshotRef] = {}
        self.sets: dict[str, SnapshotRef] = {}
        """What each branch trains on: its own set, or that of the branch whose training it
        shares."""
        self.units: dict[str, tuple[str, int]] = {}
        """Rows and seed of each branch: those of one unit share a training."""
        self.records: dict[str, BranchRecord] = {}
        self.refs: dict[str, dict[str, SnapshotRef | None]] = {}
        self.new: list[str] = []
        self.begun: dict[str, float] = {}

    def run(self, resumed: bool) -> AblationResult:
        """`resumed`: an earlier call has begun branches. Its budget was held against an estimate
        then, and what is left of it is used up now."""
        self.curate_all()
        left = self.setup.estimate()
        if not resumed:
            require_within(left, self.config.max_gpu_hours, self.meter.gpu_hours)
        create_markdown_artifact(
            key="ablation-estimate",
            markdown="\n".join(left.lines()),
            description="What is left to do",
        )
        self.tracker.open(self.plans)
        for plan in self.plans:  # those whose curation failed before MLflow was open
            if plan.name in self.records:
                self.track(plan, new=False)
        references = tuple(
            answered(self.pipeline, self.setup.suite, model)
            for model in self.pipeline.benchmark.models
            if model != "tuned"
        )
        made = create_progress_artifact(
            progress=0.0, key="ablation-progress", description="share of the branches that ended"
        )
        self.progress_id = cast(UUID, made)  # a coroutine only in async code
        self.run_branches(left.each_branch_s)
        ablation = Ablation(
            name=self.pipeline.name,
            fingerprint=self.fingerprint,
            branches=tuple(
                self.records[plan.name].branch.model_copy(
                    update={"mlflow_url": self.tracker.url(plan.name)}
                )
                for plan in self.plans
            ),
            base_model=self.pipeline.training.base_model,
            references=references,
            baseline=self.plans[0].strategy,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            mlflow_url=self.tracker.url(),
            prefect_url=prefect_url(),
        )
        cautions = cautions_of(ablation.branches)
        return self.publish(ablation.model_copy(update={"cautions": cautions}), left)

    def curate_all(self) -> None:
        """Every branch's set, and who trains on whose."""
        samples = self.samples
        for plan in self.plans:
            try:
                self.curated[plan.name] = call_stage(
                    curate,
                    samples.verdicts,
                    samples.candidates,
                    samples.tasks,
                    plan.curation,
                    samples.workloads,
                    samples.flags,
                )
            except Exception as error:  # of this rule on these samples: the others may work
                self.ended(plan, self.failed(plan, f"curation: {one_line(error)}"), new=True)
                continue
            self.units[plan.name] = content_of(self.curated[plan.name]), plan.seed
        for unit in dict.fromkeys(self.units.values()):
            members = [name for name, other in self.units.items() if other == unit]
            sets = [self.curated[name] for name in members]
            leader = leader_among(sets, self.own[members[0]], samples.tasks)
            self.sets |= dict.fromkeys(members, leader)

    # -- the branches ------------------------------------------------------------------------------

    def run_branches(self, estimated_s: float) -> None:
        """Run all that are left, as many at once as there is room for, while the budget holds
        them."""
        waiting = deque(plan for plan in self.plans if plan.name not in self.records)
        running: dict[str, Plan] = {}
        results: Results = SimpleQueue()
        try:
            while waiting or running:
                self.begin_fitting(waiting, running, results, estimated_s)
                if not running:  # the last ones had nothing left to do
                    if waiting:
                        self.leave_out(waiting, self.expected_s(estimated_s))
                    return
                try:
                    plan, outcome = results.get(timeout=TICK_S)
                except Empty:
                    self.show_progress(running)
                    continue
                del running[plan.name]
                self.settle(plan, outcome)
        except BaseException:
            self.resources.stopped.set()
            raise

    def begin_fitting(
        self, waiting: deque[Plan], running: dict[str, Plan], results: Results, estimated_s: float
    ) -> None:
        """Begin branches as long as devices and budget hold another one."""
        while len(running) < self.setup.parallel:
            # not one whose training is running: its result exists when that branch ends
            busy = {self.units[name] for name in running}
            plan = next((plan for plan in waiting if self.units[plan.name] not in busy), None)
            if plan is None:
                return
            if not self.served(plan):
                if not self.meter.fits(self.expected_s(estimated_s), running):
                    return
                running[plan.name] = plan
                self.begin(plan, results)
            waiting.remove(plan)

    def served(self, plan: Plan) -> bool:
        """Record a branch that has nothing left to do, or that shares a training which failed just
        now."""
        for name in self.new:
            record = self.records[name]
            if record.branch.state == "failed" and self.units.get(name) == self.units[plan.name]:
                error = f"shares the training of {name}: {record.branch.error}"
                self.ended(plan, self.failed(plan, error), new=True)
                return True
        made = finished_branch(
            self.own[plan.name], self.samples.tasks, self.sets[plan.name], self.setup.suite
        )
        if made is None:
            return False
        before = load_record(self.directory, plan.name)
        if (
            before is not None
            and before.branch.state == "done"
            and before.branch.scores == made.scores.fingerprint
        ):
            self.ended(plan, before, made, new=False)
        else:
            self.ended(plan, self.done(plan, made), made, new=True)
        return True

    def begin(self, plan: Plan, results: Results) -> None:
        """Run a branch in a thread of its own, as a subflow: Prefect knows its parent by the
        context that is copied. A daemon, so that an interrupted ablation does not wait for it."""
        # here, because Ray takes signals in the main thread only
        start_ray(self.pipeline.verification.ray_address)
        context = contextvars.copy_context()
        self.begun[plan.name] = time.monotonic()
        arguments = (
            self.own[plan.name],
            self.samples.tasks,
            self.sets[plan.name],
            self.setup.suite,
        )

        def work() -> None:
            BRANCH.set(plan.name)
            try:
                results.put((plan, run_branch(plan.name, *arguments)))
            except BaseException as error:
                results.put((plan, error))

        threading.Thread(target=context.run, args=(work,), name=plan.name, daemon=True).start()

    def settle(self, plan: Plan, outcome: Trained | BaseException) -> None:
        """Record what a branch's thread ended with. Raises what is no Exception."""
        if isinstance(outcome, Trained):
            self.ended(plan, self.done(plan, outcome), outcome, new=True)
        elif isinstance(outcome, Exception):
            self.log.error("branch %s failed: %s", plan.name, one_line(outcome))
            self.ended(plan, self.failed(plan, one_line(outcome)), new=True)
        else:
            raise outcome

    def leave_out(self, waiting: deque[Plan], expected_s: float) -> None:
        """Record the branches that the budget does not hold, but for those that are done."""
        error = (
            f"the budget of {hours(self.config.max_gpu_hours or 0)} does not hold it:"
            f" {hours(self.meter.gpu_hours)} are spent and a branch takes about"
            f" {hours(expected_s / 3600)}; rerun with a larger --max-gpu-hours to continue"
        )
        for plan in waiting:
            if not self.served(plan):
                record = BranchRecord(branch=self.as_branch(plan, "left_out", error=error))
                self.ended(plan, record, new=False)

    def expected_s(self, estimated_s: float) -> float:
        """Device seconds of a branch: the mean of those that did all of their work in this
        ablation, else the estimate."""
        took = [
            sum(record.phases_s.values())
            for record in self.records.values()
            if record.branch.state == "done" and not record.shares_with
        ]
        took = [seconds for seconds in took if seconds > 0]
        return fmean(took) if took else estimated_s

    # -- how a branch ended ------------------------------------------------------------------------

    def done(self, plan: Plan, made: Trained) -> BranchRecord:
        """The record of a finished branch."""
        headline = training_headline(made.trained)
        sharing = [name for name in self.records if name != plan.name]
        branch = self.as_branch(
            plan,
            "done",
            trained=made.trained.fingerprint,
            scores=made.scores.fingerprint,
            answers=made.answers,
            loss_last=headline.get("train_loss_last"),
            held_out_loss_last=headline.get("held_out_loss_last"),
        )
        benchmark = self.pipeline.benchmark
        return BranchRecord(
            branch=branch,
            base_model=self.pipeline.training.base_model,
            max_tokens=benchmark.sampling.max_tokens,
            answers=self.setup.suite.open().manifest["rows"] * benchmark.samples_per_task,
            train_s=made.trained.open().manifest.get("seconds"),
            phases_s=self.meter.phases_of(plan.name),
            shares_with=next(
                (name for name in sharing if self.units.get(name) == self.units[plan.name]), None
            ),
        )

    def failed(self, plan: Plan, error: str) -> BranchRecord:
        """The record of a branch that failed."""
        phases = self.meter.phases_of(plan.name)
        return BranchRecord(branch=self.as_branch(plan, "failed", error=error), phases_s=phases)

    def as_branch(self, plan: Plan, state: BranchState, **facts: Any) -> Branch:
        """What every record says of a branch, and `facts`."""
        curated, begun = self.curated.get(plan.name), self.begun.get(plan.name)
        spent_s = sum(self.meter.phases_of(plan.name).values())
        return Branch(
            name=plan.name,
            strategy=plan.strategy,
            size=plan.size,
            seed=plan.seed,
            state=state,
            rows=curated.open().manifest["rows"] if curated else None,
            curated=curated.fingerprint if curated else None,
            gpu_hours=round(spent_s / 3600, 6),
            seconds=round(time.monotonic() - begun, 1) if begun else None,
            prefect_url=self.resources.pages.get(plan.name),
            **facts,
        )

    def ended(
        self, plan: Plan, record: BranchRecord, made: Trained | None = None, *, new: bool
    ) -> None:
        """Keep how a branch ended, tell MLflow and the terminal. `new` is whether anything was done
        for it."""
        self.records[plan.name] = record
        self.refs[plan.name] = {
            "curated": self.sets.get(plan.name),
            "trained": made.trained if made else None,
            "scores": made.scores if made else None,
        }
        branch = record.branch
        took = "as before"
        if new:
            self.new.append(plan.name)
            save_record(self.directory, record)
            self.log.info("branch %s %s (%s)", plan.name, branch.state, self.meter.describe())
            took = f"{branch.seconds:.0f} s" if branch.seconds else "now"
        if branch.state != "left_out":
            self.track(plan, new=new)
        line = f"{branch.name} {branch.state.replace('_', ' ')}, {took}"
        counts = len(self.records), len(self.plans)
        report(ENDED, *counts, f"{line}  ({self.meter.describe()})")

    def track(self, plan: Plan, *, new: bool) -> None:
        """Write a branch to MLflow."""
        spent = (len(self.records), round(self.meter.gpu_hours, 6)) if new else None
        own = self.own[plan.name]
        self.tracker.branch(own, self.records[plan.name], self.refs[plan.name], spent)

    def show_progress(self, running: dict[str, Plan]) -> None:
        """Every few seconds: put what was spent on disk, and where the ablation is in Prefect's
        artifact."""
        self.meter.save()
        said = (
            f"{len(self.records)} of {len(self.plans)} branches ended; {self.meter.describe()};"
            f" at work: {', '.join(running) or 'none'}"
        )
        share = 100.0 * len(self.records) / len(self.plans)
        try:
            update_progress_artifact(self.progress_id, progress=share, description=said)
        except Exception as error:  # a picture of the work, not the work
            self.log.warning("the progress artifact was not updated: %s", one_line(error))

    def publish(self, ablation: Ablation, left: Estimate) -> AblationResult:
        """Write the comparison beside the records, to MLflow and to Prefect."""
        summary = self.directory / "sweep.json"
        write_text(summary, ablation.model_dump_json(indent=2))
        resamples = self.pipeline.benchmark.resamples
        files, caution = compared(ablation, self.directory, resamples)
        rows = strategy_rows(ablation.branches, self.pipeline)
        records = [self.records[plan.name] for plan in self.plans]
        self.tracker.close(records, rows, [summary, *files], self.meter.gpu_hours)
        if rows:
            create_table_artifact(
                key="ablation",
                table=cells(rows),
                description="Strategies, with 95 % intervals, against the first",
            )
        pages = {path.suffix: path for path in files}
        if markdown := pages.get(".md"):
            create_markdown_artifact(
                key="comparison",
                markdown=markdown.read_text(encoding="utf-8"),
                description="Which strategy won",
            )
        self.show_progress({})
        cautions = (*ablation.cautions, *caution, *self.tracker.failures)
        return AblationResult(
            ablation=ablation.model_copy(update={"cautions": cautions}),
            strategies=tuple(rows),
            estimate=left,
            gpu_hours=round(self.meter.gpu_hours, 6),
            directory=str(self.directory),
            comparison=str(pages[".html"]) if ".html" in pages else None,
            mlflow_run=self.tracker.run_id,
            new=tuple(self.new),
        )
