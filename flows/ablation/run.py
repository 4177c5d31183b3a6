"""An ablation from a terminal: an embedded Prefect, progress while it works, a table when it
ends."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from flows.ablation.plan import AblationConfig
from flows.ablation.records import BRANCH, SHARED, hours
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
        verb = "holds" if within else "does not hold"
        lines.append(f"the budget of {hours(budget)} {verb} it")
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
        from flows.ablation.flow import ENDED

        if stage == ENDED:
            self.say(f"{ENDED} {done}/{total}  {note}")
        else:
            self.update(BRANCH.get() or SHARED, done, total, note, stage)


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "strategy": lambda row: row["strategy"],
    "size": lambda row: "all" if row["size"] is None else f"{row['size']:,}",
    "rows": lambda row: f"{row['rows']:,}",
    "seeds": lambda row: str(row["seeds"]),
    "exec_at_1": lambda row: _interval(row, "exec_at_1"),
    "fast_1_at_1": lambda row: _interval(row, "fast_1_at_1"),
    "exec_at_1 minus the first": lambda row: _interval(row, "difference", "+"),
    "p (Holm)": lambda row: "" if row["p_holm"] is None else f"{row['p_holm']:.3f}",
}


def print_ablation(data: dict[str, Any]) -> None:
    """The end of an ablation on a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 140, markup=False, highlight=False)
    if data["strategies"]:
        table = Table(title=f"concur ablate: {data['name']}")
        for name in COLUMNS:
            table.add_column(name, justify="left" if name == "strategy" else "right")
        for row in data["strategies"]:
            table.add_row(*(cell(row) for cell in COLUMNS.values()))
        console.print(table)
        console.print(
            "95 % intervals over tasks, the seeds of a strategy pooled; differences are paired by"
            " task"
        )
    counts = Counter(branch["state"].replace("_", " ") for branch in data["branches"])
    said = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    console.print(f"{said} of {len(data['branches'])} branches")
    for branch in data["branches"]:
        if branch["state"] != "done":
            console.print(Text(f"  {branch['name']}: {branch['error']}"), soft_wrap=True)
    budget = data["budget_gpu_hours"]
    left = "" if budget is None else f" of {hours(budget)}"
    console.print(f"spent {hours(data['gpu_hours'])}{left}; {data['seconds']:.0f} s")
    for caution in data["cautions"]:
        console.print(Text(f"caution: {caution}"), soft_wrap=True)
    if data["comparison"]:
        print(f"comparison:  {data['comparison']}")
    if data["mlflow_run"]:
        where = f"{data['experiment']}, at {data['tracking_uri']}"
        print(f"MLflow:      run {data['mlflow_run']} in {where}")


def _interval(row: dict[str, Any], name: str, sign: str = "") -> str:
    value, lower, upper = row[name], row[f"{name}_lower"], row[f"{name}_upper"]
    if value is None:
        return ""
    bounds = "" if lower is None else f" [{lower:{sign}.3f}, {upper:{sign}.3f}]"
    return f"{value:{sign}.3f}{bounds}"
