"""`concur ablate`: strategies x sizes x seeds on the same samples, each curated, trained and
benchmarked; one flow, branches side by side.

Guarantees: the refresh, the base model's and recorded answers are done once; finished work is not
done again, whatever was killed; branches of the same rows and seed share one training; a branch
that fails stops no other, is recorded with its error, and is what the same command does next time;
no branch begins that the budget does not hold. Does not guarantee that the budget is never passed:
what is begun is finished, and an estimate can be wrong. Failures of the refresh or of the shared
answers end the ablation: no branch could do without.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import fmean
from typing import Any

from prefect import flow
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.logging import get_run_logger

from flows.ablation.branch import (
    HANDS,
    Hands,
    Trained,
    answered,
    finished_branch,
    leader_among,
    run_branch,
)
from flows.ablation.devices import branches_at_once, visible_gpus
from flows.ablation.end import cautions_of, compared, one_line, prefect_url
from flows.ablation.estimate import Estimate, estimate, hours, require_within
from flows.ablation.meter import BRANCH, AblationProgress, Meter
from flows.ablation.plan import AblationConfig, Plan, branch_pipeline, pipeline_of, planned_branches
from flows.ablation.records import (
    BranchRecord,
    ablation_dir,
    load_record,
    save_record,
    sole_writer,
    write_text,
)
from flows.ablation.samples import content_of, finished_samples, finished_tasks, samples_of
from flows.ablation.table import strategy_rows
from flows.ablation.track import AblationTracker
from flows.ablation.work import fingerprint_of, work_left
from flows.artifacts import create_markdown_artifact, create_table_artifact
from flows.config import PipelineConfig
from flows.naming import ablation_name
from flows.refresh import Samples, verified_samples
from flows.runtime.root_lock import in_use
from flows.runtime.shutdown import stops_soon
from kernels_eval.cluster.pool import start_ray
from kernels_eval.records import Record
from tasks.benchmark.comparison.records import Ablation, Branch
from tasks.benchmark.stage import Answers
from tasks.curation.step import curate
from tasks.policy import call_stage
from tasks.reporting.text import cells
from tasks.sources import stage as sources
from tasks.sources.step import load_tasks
from tasks.store.snapshot import SnapshotRef

TICK_S = 2.0
WATCH: ContextVar[AblationProgress | None] = ContextVar("concur_ablation_watch", default=None)
"""Who shows the ablation on a terminal, where there is one."""


class AblationResult(Record):
    """An ablation as far as it came, and where it lies."""

    ablation: Ablation
    strategies: tuple[dict[str, Any], ...]
    estimate: Estimate
    gpu_hours: float
    directory: str
    comparison: str | None
    mlflow_run: str | None
    new: tuple[str, ...]
    """Branches that anything was done for in this run."""

    @property
    def complete(self) -> bool:
        return all(branch.state == "done" for branch in self.ablation.branches)


@flow(name="ablation", flow_run_name=ablation_name)
def ablate(config: AblationConfig | None = None) -> AblationResult:
    """Which strategy makes the best training set, at which size, and how sure that is: every branch
    is curated, trained and benchmarked.

    A branch that fails is a caution and not the end. The same parameters again go on from what is
    finished. Raises UsageError before anything costly where the estimate is above the budget.
    """
    config = config or AblationConfig()
    pipeline, plans = pipeline_of(config), planned_branches(config)
    meter = Meter(config.max_gpu_hours)
    if watch := WATCH.get():
        watch.meter = meter
    gpus = visible_gpus(pipeline)
    parallel = branches_at_once(config, pipeline, gpus)
    hands = Hands(
        meter, gpus, max(1, gpus // parallel), in_process=pipeline.synthesis.sampler != "vllm"
    )
    HANDS.set(hands)
    pipeline, found, first = first_look(config, pipeline, plans, gpus, parallel)
    if found is None:  # else the sets are counted first, which costs next to nothing
        require_within(first, config.max_gpu_hours)
    suite = load_tasks(pipeline.benchmark.tasks, pipeline.root)
    if found is None:
        with meter.held("refresh", gpus or 1):
            found = verified_samples(pipeline)
    fingerprint = fingerprint_of(config, pipeline, plans, found, suite)
    directory = ablation_dir(pipeline.root, fingerprint)
    with stops_soon(), in_use(pipeline.root), sole_writer(directory):
        begun = meter.keep_in(directory)
        return AblationRun(
            config, pipeline, plans, found, suite, hands, fingerprint, directory, parallel
        ).run(begun)


def first_look(
    config: AblationConfig,
    pipeline: PipelineConfig,
    plans: tuple[Plan, ...],
    gpus: int,
    parallel: int,
) -> tuple[PipelineConfig, Samples | None, Estimate]:
    """The samples where they are there, and what is left, estimated. Does nothing but read task
    sources."""
    if config.verdicts:
        language, found = samples_of(pipeline.root, config.verdicts)
        pipeline = pipeline.model_copy(update={"language": language})
    else:
        found = finished_samples(pipeline)
    suite = sources.run(pipeline.benchmark.tasks, pipeline.root)
    tasks = (
        0
        if found
        else (finished_tasks(pipeline) or sources.run(pipeline.tasks, pipeline.root))
        .open()
        .manifest["rows"]
    )
    work = work_left(pipeline, plans, found, suite, tasks)
    return pipeline, found, estimate(pipeline, work, gpus=gpus, parallel=parallel)


class AblationRun:
    """One call of an ablation whose samples are there."""

    def __init__(
        self,
        config: AblationConfig,
        pipeline: PipelineConfig,
        plans: tuple[Plan, ...],
        samples: Samples,
        suite: SnapshotRef,
        hands: Hands,
        fingerprint: str,
        directory: Path,
        parallel: int,
    ) -> None:
        self.config, self.pipeline, self.plans, self.samples, self.suite = (
            config,
            pipeline,
            plans,
            samples,
            suite,
        )
        self.hands, self.meter, self.fingerprint, self.directory, self.parallel = (
            hands,
            hands.meter,
            fingerprint,
            directory,
            parallel,
        )
        self.log = get_run_logger()
        self.own = {
            plan.name: branch_pipeline(pipeline, plan, share=hands.share if hands.gpus else None)
            for plan in plans
        }
        self.curated: dict[str, SnapshotRef] = {}
        self.sets: dict[str, SnapshotRef] = {}
        """What each branch trains on: its own set, or that of the branch it shares the training
        with."""
        self.units: dict[str, tuple[str, int]] = {}
        self.records: dict[str, BranchRecord] = {}
        self.refs: dict[str, dict[str, SnapshotRef | None]] = {}
        self.new: list[str] = []
        self.begun: dict[str, float] = {}

    def run(self, begun: bool) -> AblationResult:
        """`begun`: by an earlier call. Its budget was held against an estimate then, and what is
        left of it is used up now."""
        self.curate_all()
        left = self.estimated()
        if not begun:
            require_within(left, self.config.max_gpu_hours, self.meter.gpu_hours)
        create_markdown_artifact(
            key="ablation-estimate",
            markdown="\n".join(left.lines()),
            description="What is left to do",
        )
        self.tracker = AblationTracker(self.config, self.pipeline, self.fingerprint, self.log.error)
        self.tracker.open(self.plans)
        references = [
            answered(self.pipeline, self.suite, model)
            for model in self.pipeline.benchmark.models
            if model != "tuned"
        ]
        self.progress_id = create_progress_artifact(
            progress=0.0, key="ablation-progress", description="share of the branches that ended"
        )
        self.run_branches(left.each_branch_s)
        return self.finish(left, references)

    # -- before the branches -----------------------------------------------------------------------

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
            except Exception as error:  # of this rule on these samples: the others may do
                self.ended(plan, self.failed(plan, f"curation: {one_line(error)}"), new=True)
                continue
            self.units[plan.name] = content_of(self.curated[plan.name]), plan.seed
        for unit in dict.fromkeys(self.units.values()):
            members = [name for name, other in self.units.items() if other == unit]
            leader = leader_among(
                [self.curated[name] for name in members], self.own[members[0]], samples.tasks
            )
            self.sets |= dict.fromkeys(members, leader)

    def estimated(self) -> Estimate:
        work = work_left(self.pipeline, self.plans, self.samples, self.suite, 0)
        return estimate(self.pipeline, work, gpus=self.hands.gpus, parallel=self.parallel)

    # -- the branches ------------------------------------------------------------------------------

    def run_branches(self, expected_s: float) -> None:
        """All that are left, as many at once as there is room for, while the budget holds them."""
        waiting = deque(plan for plan in self.plans if plan.name not in self.records)
        running: dict[str, Plan] = {}
        results: SimpleQueue[tuple[Plan, Trained | BaseException]] = SimpleQueue()
        try:
            while waiting or running:
                while (
                    waiting
                    and len(running) < self.parallel
                    and (plan := self.next_of(waiting, running))
                ):
                    if self.served(plan):
                        waiting.remove(plan)
                    elif self.meter.fits(self.expected(expected_s), running):
                        waiting.remove(plan)
                        running[plan.name] = plan
                        self.begin(plan, results)
                    else:
                        break
                if waiting and not running and self.next_of(waiting, running):
                    self.leave_out(waiting, self.expected(expected_s))
                    return
                if not running:  # the last ones had nothing left to do
                    continue
                try:
                    plan, outcome = results.get(timeout=TICK_S)
                except Empty:
                    self.tick(running)
                    continue
                del running[plan.name]
                self.settle(plan, outcome)
        except BaseException:
            self.hands.stopped.set()
            raise

    def next_of(self, waiting: deque[Plan], running: dict[str, Plan]) -> Plan | None:
        """The first branch whose training no running branch is at: its result is there when that
        one ends."""
        busy = {self.units[name] for name in running}
        return next((plan for plan in waiting if self.units[plan.name] not in busy), None)

    def served(self, plan: Plan) -> bool:
        """Record a branch that has nothing left to do, or that shares a training which failed just
        now."""
        sharing = next(
            (
                name
                for name in self.new
                if self.units.get(name) == self.units[plan.name] and name != plan.name
            ),
            None,
        )
        if sharing and self.records[sharing].branch.state == "failed":
            self.ended(
                plan,
                self.failed(
                    plan, f"shares the training of {sharing}: {self.records[sharing].branch.error}"
                ),
                new=True,
            )
            return True
        made = finished_branch(
            self.own[plan.name], self.samples.tasks, self.sets[plan.name], self.suite
        )
        if made is None:
            return False
        before = load_record(self.directory, plan.name)
        same = (
            before is not None
            and before.branch.state == "done"
            and before.branch.scores == made.scores.fingerprint
        )
        record = before if before is not None and same else self.done(plan, made)
        self.ended(plan, record, made, new=not same)
        return True

    def begin(self, plan: Plan, results: SimpleQueue[tuple[Plan, Trained | BaseException]]) -> None:
        """In a thread of its own, as a subflow: Prefect knows its parent by the context that is
        copied. A daemon, so that an interrupted ablation does not wait for it."""
        start_ray(
            self.pipeline.verification.ray_address
        )  # here, because Ray takes signals in the main thread only
        context = contextvars.copy_context()
        self.begun[plan.name] = time.monotonic()

        def work() -> None:
            BRANCH.set(plan.name)
            try:
                arguments = (
                    self.own[plan.name],
                    self.samples.tasks,
                    self.sets[plan.name],
                    self.suite,
                )
                results.put((plan, run_branch(plan.name, *arguments)))
            except BaseException as error:
                results.put((plan, error))

        threading.Thread(target=context.run, args=(work,), name=plan.name, daemon=True).start()

    def settle(self, plan: Plan, outcome: Trained | BaseException) -> None:
        if isinstance(outcome, Trained):
            self.ended(plan, self.done(plan, outcome), outcome, new=True)
        elif isinstance(outcome, Exception):
            self.log.error("branch %s failed: %s", plan.name, one_line(outcome))
            self.ended(plan, self.failed(plan, one_line(outcome)), new=True)
        else:
            raise outcome

    def leave_out(self, waiting: deque[Plan], expected_s: float) -> None:
        why = (
            f"the budget of {hours(self.config.max_gpu_hours or 0)} does not hold it:"
            f" {hours(self.meter.gpu_hours)} are spent and a branch takes about"
            f" {hours(expected_s / 3600)}; the same command with a larger --max-gpu-hours goes on"
        )
        for plan in waiting:
            if not self.served(plan):
                self.ended(
                    plan,
                    BranchRecord(branch=self.as_branch(plan, "left_out", error=why)),
                    new=False,
                )

    def expected(self, estimated_s: float) -> float:
        """Device seconds of a branch: what those of this ablation took that did all of their work
        in it, else the estimate."""
        alone = [
            each
            for each in self.records.values()
            if each.branch.state == "done" and not each.shares_with
        ]
        took = [seconds for each in alone if (seconds := sum(each.phases_s.values())) > 0]
        return fmean(took) if took else estimated_s

    # -- how a branch ended ------------------------------------------------------------------------

    def done(self, plan: Plan, made: Trained) -> BranchRecord:
        from flows.track import train_headline

        trained = made.trained.open()
        headline = train_headline(trained.manifest, trained)
        shared = next(
            (
                name
                for name in self.records
                if name != plan.name and self.units.get(name) == self.units[plan.name]
            ),
            None,
        )
        phases = self.meter.phases_of(plan.name)
        branch = self.as_branch(
            plan,
            "done",
            trained=made.trained.fingerprint,
            scores=made.scores.fingerprint,
            answers=made.answers,
            loss_last=headline.get("train_loss_last"),
            held_out_loss_last=headline.get("held_out_loss_last"),
        )
        return BranchRecord(
            branch=branch,
            base_model=self.pipeline.training.base_model,
            max_tokens=self.pipeline.benchmark.sampling.max_tokens,
            answers=self.suite.open().manifest["rows"] * self.pipeline.benchmark.samples_per_task,
            train_s=trained.manifest.get("seconds"),
            phases_s=phases,
            shares_with=shared,
        )

    def failed(self, plan: Plan, error: str) -> BranchRecord:
        return BranchRecord(
            branch=self.as_branch(plan, "failed", error=error),
            phases_s=self.meter.phases_of(plan.name),
        )

    def as_branch(self, plan: Plan, state: Any, **facts: Any) -> Branch:
        curated = self.curated.get(plan.name)
        spent = sum(self.meter.phases_of(plan.name).values())
        begun = self.begun.get(plan.name)
        return Branch(
            name=plan.name,
            strategy=plan.strategy,
            size=plan.size,
            seed=plan.seed,
            state=state,
            rows=curated.open().manifest["rows"] if curated else None,
            curated=curated.fingerprint if curated else None,
            gpu_hours=round(spent / 3600, 6),
            seconds=round(time.monotonic() - begun, 1) if begun else None,
            prefect_url=HANDS.get().pages.get(plan.name),
            **facts,
        )

    def ended(
        self, plan: Plan, record: BranchRecord, made: Trained | None = None, *, new: bool
    ) -> None:
        """Keep how a branch ended, tell MLflow and the terminal. `new` is whether anything was done
        for it."""
        self.records[plan.name] = record
        if new:
            self.new.append(plan.name)
            save_record(self.directory, record)
        self.refs[plan.name] = {
            "curated": self.sets.get(plan.name),
            "trained": None,
            "scores": None,
        }
        if made:
            self.refs[plan.name] |= {"trained": made.trained, "scores": made.scores}
        if record.branch.state != "left_out" and hasattr(self, "tracker"):
            self.tell(plan, new)
        if watch := WATCH.get():
            branch = record.branch
            took = (
                f" in {branch.seconds:.0f} s"
                if new and branch.seconds
                else ""
                if new
                else ", as before"
            )
            watch.counted(
                len(self.records),
                len(self.plans),
                f"{branch.name} {branch.state.replace('_', ' ')}{took}",
            )
        if new:
            self.log.info("branch %s %s (%s)", plan.name, record.branch.state, self.meter.said())

    def tell(self, plan: Plan, new: bool) -> None:
        spent = (len(self.records), round(self.meter.gpu_hours, 6)) if new else None
        self.tracker.branch(
            self.own[plan.name], self.records[plan.name], self.refs[plan.name], spent
        )

    def tick(self, running: dict[str, Plan]) -> None:
        """Every few seconds: what was spent is put on disk, and Prefect's artifact says where the
        ablation is."""
        self.meter.save()
        said = (
            f"{len(self.records)} of {len(self.plans)} branches ended; {self.meter.said()}; at"
            f" work: {', '.join(running) or 'none'}"
        )
        try:
            update_progress_artifact(
                self.progress_id,
                progress=100.0 * len(self.records) / len(self.plans),
                description=said,
            )
        except Exception as error:  # a picture of the work, not the work
            self.log.warning("the progress artifact was not updated: %s", one_line(error))

    # -- the end -----------------------------------------------------------------------------------

    def finish(self, left: Estimate, references: list[Answers]) -> AblationResult:
        for plan in self.plans:  # curation failed before MLflow was open
            if (
                plan.name not in self.tracker.runs
                and self.records[plan.name].branch.state == "failed"
            ):
                self.tell(plan, False)
        branches = tuple(
            self.records[plan.name].branch.model_copy(
                update={"mlflow_url": self.tracker.url(plan.name)}
            )
            for plan in self.plans
        )
        cautions = cautions_of(branches)
        ablation = Ablation(
            name=self.pipeline.name,
            fingerprint=self.fingerprint,
            branches=branches,
            base_model=self.pipeline.training.base_model,
            references=tuple(references),
            baseline=self.plans[0].strategy,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            cautions=cautions,
            mlflow_url=self.tracker.url(),
            prefect_url=prefect_url(),
        )
        write_text(self.directory / "sweep.json", ablation.model_dump_json(indent=2))
        files, caution = compared(ablation, self.directory, self.pipeline.benchmark.resamples)
        rows = strategy_rows(branches, self.pipeline)
        self.tracker.close(
            [self.records[plan.name] for plan in self.plans],
            rows,
            [self.directory / "sweep.json", *files],
            self.meter.gpu_hours,
        )
        cautions = (*cautions, *caution, *self.tracker.told)
        if rows:
            create_table_artifact(
                key="ablation",
                table=cells(rows),
                description="Strategies, with 95 % intervals, against the first",
            )
        if markdown := next((path for path in files if path.suffix == ".md"), None):
            create_markdown_artifact(
                key="comparison",
                markdown=markdown.read_text(encoding="utf-8"),
                description="Which strategy won",
            )
        self.tick({})
        return AblationResult(
            ablation=ablation.model_copy(update={"cautions": cautions}),
            strategies=tuple(rows),
            estimate=left,
            gpu_hours=round(self.meter.gpu_hours, 6),
            directory=str(self.directory),
            comparison=next((str(path) for path in files if path.suffix == ".html"), None),
            mlflow_run=self.tracker.run_id,
            new=tuple(self.new),
        )
