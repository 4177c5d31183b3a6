"""The branches of one ablation call. A failing branch is recorded and stops no other; at most the
requested number run at once."""

from __future__ import annotations

import contextvars
import time
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

from prefect.logging import get_run_logger
from prefect.settings import get_current_settings
from prefect.utilities.urls import url_for

from flows.ablation.branch import Trained, run_branch
from flows.ablation.plan import Plan
from flows.ablation.records import finished_branch, save_branch
from flows.ablation.results import one_line
from flows.ablation.track import AblationTracker
from flows.config import PipelineConfig
from kernels_eval.pool.ray import start_ray
from tasks.benchmark.comparison.records import Branch
from tasks.progress import part_of_run, report
from tasks.samples import Samples
from tasks.store import SnapshotRef
from tasks.tracking.stages import training_headline


class Job(NamedTuple):
    """A branch, its configuration, and the samples that its own rule confirmed."""

    plan: Plan
    config: PipelineConfig
    samples: Samples


@dataclass
class Branches:
    """The branches of one ablation. `ended` fills in order of ending; `new` names those that ran in
    this call."""

    jobs: list[Job]
    suite: SnapshotRef
    directory: Path
    tracker: AblationTracker
    ended: list[Branch] = field(default_factory=list)
    new: list[str] = field(default_factory=list)

    @property
    def in_order(self) -> list[Branch]:
        by_name = {branch.name: branch for branch in self.ended}
        return [by_name[job.plan.name] for job in self.jobs if job.plan.name in by_name]

    def run(self, parallel: int) -> None:
        """Run all that are left, so many at once. Raises interrupts without waiting for running
        branches."""
        left = [job for job in self.jobs if not self._keep(job)]
        if left:  # here, because Ray takes signals in the main thread only
            start_ray(left[0].config.verification.ray_address)
        pool = ThreadPoolExecutor(parallel, thread_name_prefix="branch")
        running: dict[Future[Branch], Job] = {}
        try:
            for job in left:
                # a subflow finds its parent by the context
                context = contextvars.copy_context()
                running[pool.submit(context.run, self._run_branch, job)] = job
            for future in as_completed(running):
                branch = future.result()
                save_branch(self.directory, branch)
                self.new.append(branch.name)
                self._note(running[future], branch)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _keep(self, job: Job) -> bool:
        branch = finished_branch(self.directory, job.plan.name, job.config.root)
        if branch:
            self._note(job, branch)
        return branch is not None

    def _run_branch(self, job: Job) -> Branch:
        part_of_run.set(job.plan.name)
        begun = time.monotonic()
        state = run_branch(job.plan.name, job.config, job.samples, self.suite, return_state=True)
        made = state.result(raise_on_failure=False)
        return ended_branch(
            job.plan, made, time.monotonic() - begun, run_page(state.state_details.flow_run_id)
        )

    def _note(self, job: Job, branch: Branch) -> None:
        self.ended.append(branch)
        if branch.error:
            get_run_logger().error("branch %s failed: %s", branch.name, branch.error)
        self.tracker.branch(job.config, branch)
        took = f"{branch.seconds:.0f} s" if branch.name in self.new else "as before"
        note = f"{branch.name} {branch.state}, {took}"
        report("ablation", len(self.ended), len(self.jobs), note)


def ended_branch(
    plan: Plan, made: Trained | Exception, seconds: float, prefect_url: str | None
) -> Branch:
    facts = plan.model_dump(exclude={"curation"})
    facts |= {"seconds": round(seconds, 1), "prefect_url": prefect_url}
    if isinstance(made, Exception):
        return Branch(**facts, state="failed", error=one_line(made))
    losses = training_headline(made.trained)
    return Branch(
        **facts,
        state="done",
        rows=made.curated.open().manifest["rows"],
        curated=made.curated.fingerprint,
        trained=made.trained.fingerprint,
        scores=made.scores.fingerprint,
        answers=made.answers,
        loss_last=losses.get("train_loss_last"),
        held_out_loss_last=losses.get("held_out_loss_last"),
    )


def run_page(run_id: UUID | None) -> str | None:
    if run_id is None or not get_current_settings().api.url:
        return None
    return url_for("flow-run", obj_id=run_id)
