"""An ablation from a terminal: an embedded Prefect, progress while it works, plain data when it
ends."""

from __future__ import annotations

import time
from typing import Any

from flows.ablation.plan import AblationConfig, planned_branches
from flows.config import PipelineConfig


def estimated(config: AblationConfig, pipeline: PipelineConfig) -> dict[str, Any]:
    """What the ablation would cost from here, and whether its budget holds that. Reads task sources
    and snapshots; runs nothing."""
    from flows.launch import embed

    embed(pipeline)  # before prefect is imported
    from flows.ablation.estimate import hours
    from flows.ablation.flow import branches_at_once, first_look, visible_gpus

    gpus = visible_gpus(pipeline)
    plans = planned_branches(config)
    _, found, estimate = first_look(
        config, pipeline, plans, gpus, branches_at_once(config, pipeline, gpus)
    )
    budget = config.max_gpu_hours
    within = budget is None or estimate.gpu_hours <= budget
    lines = estimate.lines()
    if found is None:
        lines.append(
            "the samples are still to be made: the estimate is made again, from counted rows,"
            " before the first training"
        )
    if budget is not None:
        lines.append(
            f"the budget of {hours(budget)} {'holds it' if within else 'does not hold it'}"
        )
    data = estimate.model_dump(mode="json")
    return {
        **data,
        "samples_are_there": found is not None,
        "budget_gpu_hours": budget,
        "within_budget": within,
        "lines": lines,
    }


def run_ablation(config: AblationConfig, pipeline: PipelineConfig) -> dict[str, Any]:
    """Run the flow in this process. Returns what the table shows, as plain data. Raises what the
    flow raises; on an interrupt the local Ray is ended first, so that no training goes on without a
    ablation."""
    from flows.launch import embed, start_server_apart

    embed(pipeline)  # before prefect is imported
    started = time.monotonic()
    start_server_apart()
    from flows.ablation.flow import WATCH, ablate
    from flows.ablation.meter import AblationProgress
    from tasks.progress import observed_by

    try:
        with AblationProgress() as progress, observed_by(progress):
            WATCH.set(progress)
            result = ablate(config)
    except KeyboardInterrupt:
        import ray

        ray.shutdown()
        raise
    ablation = result.ablation
    return {
        "name": ablation.name,
        "fingerprint": ablation.fingerprint,
        "complete": result.complete,
        "seconds": round(time.monotonic() - started, 1),
        "gpu_hours": result.gpu_hours,
        "budget_gpu_hours": config.max_gpu_hours,
        "estimate": result.estimate.model_dump(mode="json"),
        "strategies": list(result.strategies),
        "branches": [branch.model_dump(mode="json") for branch in ablation.branches],
        "new": list(result.new),
        "cautions": list(ablation.cautions),
        "directory": result.directory,
        "comparison": result.comparison,
        "mlflow_run": result.mlflow_run,
        "experiment": pipeline.tracking.experiment,
        "tracking_uri": pipeline.tracking_uri,
    }
