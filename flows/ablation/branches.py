"""The branches of one call of an ablation: whose rows each trains on, which run now, and how each
ended.

Guarantees: branches of the same rows and seed share one training; finished work is not done again;
a branch that fails stops no other and is recorded with its error; no branch begins that the budget
does not hold. Does not guarantee that the budget is never exceeded: what is begun is finished.
"""

from __future__ import annotations

import contextvars
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import fmean
from typing import cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.logging import get_run_logger

from flows.ablation.branch import (
    SharedResources,
    Trained,
    finished_branch,
    leader_among,
    run_branch,
)
from flows.ablation.plan import Plan, branch_pipeline
from flows.ablation.records import (
    BRANCH,
    BranchRecord,
    load_record,
    record_file,
    write_text,
)
from flows.ablation.results import one_line
from flows.ablation.samples import unit_of_set
from flows.ablation.track import AblationTracker
from flows.config import PipelineConfig
from kernels_eval.pool.ray import start_ray
from tasks.benchmark.comparison.records import Branch, BranchState
from tasks.curation.step import curate
from tasks.decontamination.deduplication import equal_kernels
from tasks.policy import call_stage
from tasks.progress import hours, report
from tasks.samples import Samples
from tasks.store import SnapshotRef
from tasks.tracking.stages import training_headline

TICK_S = 2.0
ENDED = "ablation"
"""The name under which ended branches are reported to `tasks.progress`."""


@dataclass
class Job:
    """A branch on its way. `rows` is the set that it trains on: its own (`curated`), or that of the
    branch whose training it shares, which is one of the same `unit`."""

    plan: Plan
    config: PipelineConfig
    curated: SnapshotRef | None = None
    rows: SnapshotRef | None = None
    unit: tuple[str, int] | None = None
    problem: str | None = None
    """Why its set could not be made."""
    begun: float | None = None
    record: BranchRecord | None = None
    new: bool = False

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def state(self) -> BranchState | None:
        return self.record.branch.state if self.record else None


class Branches:
    """Use: `curate_all`, then `run`."""

    def __init__(
        self,
        pipeline: PipelineConfig,
        plans: tuple[Plan, ...],
        samples: Samples,
        suite: SnapshotRef,
        resources: SharedResources,
        directory: Path,
        tracker: AblationTracker,
    ) -> None:
        self.samples, self.suite, self.resources = samples, suite, resources
        self.meter, self.directory, self.tracker = resources.meter, directory, tracker
        self.log = get_run_logger()
        self.ray_address = pipeline.verification.ray_address
        share = resources.share if resources.gpus else None
        self.jobs = [Job(plan, branch_pipeline(pipeline, plan, share=share)) for plan in plans]
        self.outcomes: SimpleQueue[tuple[Job, Trained | BaseException]] = SimpleQueue()
        made = create_progress_artifact(
            progress=0.0, key="ablation-progress", description="share of the branches that ended"
        )
        self.progress_id = cast(UUID, made)  # a coroutine only in async code

    def curate_all(self) -> None:
        """Make every branch's set, and find who trains on whose."""
        samples = self.samples
        units: dict[tuple[str, int], list[Job]] = {}
        for job in self.jobs:
            rule = job.plan.curation
            try:
                equal = equal_kernels(job.config.deduplication)
                job.curated = call_stage(curate, samples, rule, equal)
            except Exception as error:  # of this rule on these samples: the others may work
                job.problem = f"curation: {one_line(error)}"
                continue
            job.unit = unit_of_set(job.curated, job.plan)
            units.setdefault(job.unit, []).append(job)
        for members in units.values():
            sets = [job.curated for job in members if job.curated]
            leader = leader_among(sets, members[0].config, samples.tasks)
            for job in members:
                job.rows = leader

    def run(self, max_parallel: int, estimated_s: float) -> None:
        """Run all that are left, at most so many at once, while the budget holds them."""
        for job in self.jobs:
            if job.problem:
                self.end(job, "failed", job.problem)
        running: list[Job] = []
        try:
            while True:
                self._begin_fitting(running, max_parallel, estimated_s)
                if not running:
                    self._leave_out(self.expected_s(estimated_s))
                    return
                try:
                    job, outcome = self.outcomes.get(timeout=TICK_S)
                except Empty:
                    self.show_progress(running)
                    continue
                running.remove(job)
                if isinstance(outcome, Trained):
                    self.end(job, "done", made=outcome)
                elif isinstance(outcome, Exception):
                    self.log.error("branch %s failed: %s", job.name, one_line(outcome))
                    self.end(job, "failed", one_line(outcome))
                else:
                    raise outcome
        except BaseException:
            self.resources.stopped.set()
            raise

    @property
    def waiting(self) -> list[Job]:
        return [job for job in self.jobs if job.record is None and job.begun is None]

    @property
    def ended(self) -> list[tuple[Job, BranchRecord]]:
        return [(job, job.record) for job in self.jobs if job.record]

    def _begin_fitting(self, running: list[Job], max_parallel: int, estimated_s: float) -> None:
        """Begin branches as long as devices and budget hold another one."""
        while len(running) < max_parallel:
            # not one whose training is running: its result exists when that branch ends
            busy = {job.unit for job in running}
            job = next((job for job in self.waiting if job.unit not in busy), None)
            if job is None:
                return
            if not self._served(job):
                names = [job.name for job in running]
                if not self.meter.fits(self.expected_s(estimated_s), names):
                    return
                running.append(job)
                self._begin(job)

    def _served(self, job: Job) -> bool:
        """Record a branch that has nothing left to do, or that shares a training which failed just
        now."""
        for other, record in self.ended:
            if other.new and other.state == "failed" and other.unit == job.unit:
                error = f"shares the training of {other.name}: {record.branch.error}"
                self.end(job, "failed", error)
                return True
        assert job.rows is not None
        made = finished_branch(job.config, self.samples.tasks, job.rows, self.suite)
        if made:
            self.end(job, "done", made=made)
        return made is not None

    def _begin(self, job: Job) -> None:
        """Run a branch in a thread of its own, as a subflow: Prefect knows its parent by the
        context that is copied. A daemon, so that an interrupted ablation does not wait for it."""
        start_ray(self.ray_address)  # here, because Ray takes signals in the main thread only
        assert job.rows is not None
        arguments = (job.name, job.config, self.samples.tasks, job.rows, self.suite)
        job.begun = time.monotonic()

        def work() -> None:
            BRANCH.set(job.name)
            try:
                self.outcomes.put((job, run_branch(*arguments)))
            except BaseException as error:
                self.outcomes.put((job, error))

        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(work,), name=job.name, daemon=True).start()

    def _leave_out(self, expected_s: float) -> None:
        """Record the branches that the budget does not hold, but for those that are done."""
        for job in self.waiting:
            if not self._served(job):
                error = (
                    f"the budget of {hours(self.meter.budget or 0)} is too small for it:"
                    f" {hours(self.meter.gpu_hours)} are spent and a branch takes about"
                    f" {hours(expected_s / 3600)}; rerun with a larger --max-gpu-hours to continue"
                )
                self.end(job, "left_out", error)

    def expected_s(self, estimated_s: float) -> float:
        """Device seconds of a branch: the mean of those that did all of their work in this
        ablation, else the estimate."""
        took = [sum(record.phases_s.values()) for _, record in self.ended if record.measured]
        took = [seconds for seconds in took if seconds > 0]
        return fmean(took) if took else estimated_s

    # -- how a branch ended ------------------------------------------------------------------------

    def end(
        self, job: Job, state: BranchState, error: str | None = None, made: Trained | None = None
    ) -> None:
        """Keep how a branch ended, tell MLflow and the terminal. What an earlier call recorded of a
        branch that has nothing left to do is kept as it is."""
        path = record_file(self.directory, job.name)
        before = load_record(path) if made and not job.begun else None
        if before and before.branch.state == "done" and made:
            before = before if before.branch.scores == made.scores.fingerprint else None
        job.record = before or self._record(job, state, error, made)
        job.new = before is None and state != "left_out"
        took = "as before"
        if job.new:
            write_text(path, job.record.model_dump_json(indent=2))
            self.log.info("branch %s %s (%s)", job.name, state, self.meter.describe())
            took = f"{seconds:.0f} s" if (seconds := job.record.branch.seconds) else "now"
        ended = len(self.ended)
        if state != "left_out":
            spent = (ended, round(self.meter.gpu_hours, 6)) if job.new else None
            self.tracker.branch(job.config, job.record, job.rows, made, spent)
        line = f"{job.name} {state.replace('_', ' ')}, {took}  ({self.meter.describe()})"
        report(ENDED, ended, len(self.jobs), line)

    def _record(
        self, job: Job, state: BranchState, error: str | None, made: Trained | None
    ) -> BranchRecord:
        phases = self.meter.phases_of(job.name)
        headline = training_headline(made.trained) if made else {}
        branch = Branch(
            **job.plan.model_dump(exclude={"curation"}),
            state=state,
            error=error,
            rows=job.curated.open().manifest["rows"] if job.curated else None,
            curated=job.curated.fingerprint if job.curated else None,
            trained=made.trained.fingerprint if made else None,
            scores=made.scores.fingerprint if made else None,
            answers=made.answers if made else None,
            loss_last=headline.get("train_loss_last"),
            held_out_loss_last=headline.get("held_out_loss_last"),
            gpu_hours=round(sum(phases.values()) / 3600, 6),
            seconds=round(time.monotonic() - job.begun, 1) if job.begun else None,
            prefect_url=self.resources.pages.get(job.name),
        )
        if made is None:
            return BranchRecord(branch=branch, phases_s=phases)
        benchmark = job.config.benchmark
        sharing = (other.name for other, _ in self.ended if other.unit == job.unit)
        return BranchRecord(
            branch=branch,
            base_model=job.config.training.base_model,
            max_tokens=benchmark.sampling.max_tokens,
            answers=self.suite.open().manifest["rows"] * benchmark.samples_per_task,
            train_s=made.trained.open().manifest.get("seconds"),
            phases_s=phases,
            shares_with=next(sharing, None),
        )

    def show_progress(self, running: list[Job]) -> None:
        """Every few seconds: put what was spent on disk, and where the ablation is in Prefect's
        artifact."""
        self.meter.save()
        ended, names = len(self.ended), ", ".join(job.name for job in running)
        said = (
            f"{ended} of {len(self.jobs)} branches ended; {self.meter.describe()};"
            f" running: {names or 'none'}"
        )
        share = 100.0 * ended / len(self.jobs)
        try:
            update_progress_artifact(self.progress_id, progress=share, description=said)
        except Exception as error:  # a picture of the work, not the work
            self.log.warning("the progress artifact was not updated: %s", one_line(error))
