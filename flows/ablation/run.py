"""An ablation from a terminal: an embedded Prefect, progress while it works, a table when it
ends."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from flows.ablation.plan import AblationConfig
from flows.ablation.records import BRANCH, SHARED, hours
from flows.cli.common import print_table
from flows.config import PipelineConfig
from flows.launch import embed, start_server_apart
from flows.runtime.terminal import ProgressRows


def estimated(config: AblationConfig, pipeline: PipelineConfig) -> dict[str, Any]:
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
            "the samples are still to be made: the estimate is made again, from counted rows,"
            " before the first training"
        )
    if budget is not None:
        lines.append(f"the budget of {hours(budget)} {'holds' if within else 'does not hold'} it")
    return {
        **estimate.model_dump(mode="json"),
        "samples_are_there": setup.samples is not None,
        "budget_gpu_hours": budget,
        "within_budget": within,
        "lines": lines,
    }


def run_ablation(config: AblationConfig, pipeline: PipelineConfig) -> dict[str, Any]:
    """Run the flow in this process. Returns what the table shows, as plain data. Raises what the
    flow raises; on an interrupt the local Ray is ended first, so that no training continues
    without one."""
    embed(pipeline)  # before prefect is imported
    started = time.monotonic()
    start_server_apart()
    from flows.ablation.flow import ablate
    from tasks.progress import observed_by

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


INTERVALS = {
    "exec_at_1": "exec_at_1",
    "fast_1_at_1": "fast_1_at_1",
    "exec_at_1 minus the first": "difference",
}
COUNTS = ("size", "rows", "seeds")


def print_ablation(data: dict[str, Any]) -> None:
    """The end of an ablation on a terminal."""
    from tasks.reporting.text import clean

    if data["strategies"]:
        right = (*COUNTS, *INTERVALS, "p (Holm)")
        rows = [_row(row) for row in data["strategies"]]
        print_table(f"concur ablate: {data['name']}", ("strategy", *right), rows, right=right)
        print("95 % intervals over tasks, the seeds of a strategy pooled; differences are paired")
    counts = Counter(branch["state"].replace("_", " ") for branch in data["branches"])
    said = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    lines = [f"{said} of {len(data['branches'])} branches"]
    lines += [
        f"  {branch['name']}: {branch['error']}"
        for branch in data["branches"]
        if branch["state"] != "done"
    ]
    budget = data["budget_gpu_hours"]
    left = "" if budget is None else f" of {hours(budget)}"
    lines.append(f"spent {hours(data['gpu_hours'])}{left}; {data['seconds']:.0f} s")
    lines += [f"caution: {caution}" for caution in data["cautions"]]
    if data["comparison"]:
        lines.append(f"comparison:  {data['comparison']}")
    if data["mlflow_run"]:
        where = f"{data['experiment']}, at {data['tracking_uri']}"
        lines.append(f"MLflow:      run {data['mlflow_run']} in {where}")
    for line in lines:
        print(clean(line, one_line=True))


def _row(row: dict[str, Any]) -> list[str]:
    counts = ["all" if row[name] is None else f"{row[name]:,}" for name in COUNTS]
    intervals = [_interval(row, name, "+" * (name == "difference")) for name in INTERVALS.values()]
    p = "" if row["p_holm"] is None else f"{row['p_holm']:.3f}"
    return [row["strategy"], *counts, *intervals, p]


def _interval(row: dict[str, Any], name: str, sign: str) -> str:
    value, lower, upper = (row[f"{name}{bound}"] for bound in ("", "_lower", "_upper"))
    if value is None:
        return ""
    bounds = "" if lower is None else f" [{lower:{sign}.3f}, {upper:{sign}.3f}]"
    return f"{value:{sign}.3f}{bounds}"
