"""An ablation from a terminal: an embedded Prefect, progress while it works, a table when it
ends."""

from __future__ import annotations

import time

from flows.ablation.plan import AblationConfig
from flows.ablation.records import BRANCH, SHARED
from flows.config import PipelineConfig
from flows.launch import embed, start_server_apart
from flows.runtime.terminal import ProgressRows
from kernels_eval.records import Json
from tasks.progress import hours, observed_by


def estimated(config: AblationConfig, pipeline: PipelineConfig) -> Json:
    """What the ablation would cost from here, and whether its budget holds that. Reads task sources
    and snapshots; runs nothing."""
    embed(pipeline)  # before prefect is imported
    from flows.ablation.flow import set_up

    setup = set_up(config, pipeline)
    estimate, budget = setup.estimate(), config.max_gpu_hours
    within = budget is None or estimate.gpu_hours <= budget
    lines = estimate.lines()
    if setup.samples is None:
        lines.append(
            "the samples do not exist yet: the estimate is repeated with counted rows before"
            " the first training"
        )
    if budget is not None:
        lines.append(f"this is {'within' if within else 'above'} the budget of {hours(budget)}")
    return {
        **estimate.model_dump(mode="json"),
        "samples_are_there": setup.samples is not None,
        "budget_gpu_hours": budget,
        "within_budget": within,
        "lines": lines,
    }


def run_ablation(config: AblationConfig, pipeline: PipelineConfig) -> Json:
    """Run the flow in this process. Returns what the table shows, as plain data. Raises what the
    flow raises; on an interrupt the local Ray is ended first, so that no training continues
    without one."""
    embed(pipeline)  # before prefect is imported
    started = time.monotonic()
    start_server_apart()
    from flows.ablation.flow import ablate

    progress = AblationProgress(width=28)
    try:
        with progress, observed_by(progress):
            result = ablate(config)
    except KeyboardInterrupt:
        import ray

        ray.shutdown()
        raise
    data = result.model_dump(mode="json")
    ablation = data.pop("ablation")
    return data | {
        **{name: ablation[name] for name in ("name", "fingerprint", "branches", "cautions")},
        "complete": result.complete,
        "seconds": round(time.monotonic() - started, 1),
        "budget_gpu_hours": config.max_gpu_hours,
        "experiment": pipeline.tracking.experiment,
        "tracking_uri": pipeline.tracking_uri,
    }


class AblationProgress(ProgressRows):
    """An observer (tasks.progress) that shows on stderr which branch is where, and a line for each
    branch that ended."""

    def __call__(self, stage: str, done: int, total: int, note: str) -> None:
        from flows.ablation.branches import ENDED

        if stage == ENDED:
            self.say(f"{ENDED} {done}/{total}  {note}")
        else:
            self.update(BRANCH.get() or SHARED, done, total, note, stage)
