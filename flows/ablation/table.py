"""The end of an ablation as a table: each strategy at each size, over its seeds, and how it differs
from the first strategy.

Guarantees: differences are paired by task (tasks.benchmark.comparing) and their p values corrected
by Holm over the strategies. Seeds are
pooled: samples of all seeds of a strategy count as samples of one model, so the interval is over
tasks, and says nothing about how much seeds differ; `comparison.html` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flows.ablation.estimate import hours
from flows.config import PipelineConfig
from tasks.benchmark.comparing import compare_all
from tasks.benchmark.comparison.records import Branch
from tasks.benchmark.scoring import score
from tasks.benchmark.stage import Answers, answers_frame

TRACK = "custom_kernel"


def strategy_rows(branches: Sequence[Branch], pipeline: PipelineConfig) -> list[dict[str, Any]]:
    """One row per strategy and size with a branch that is done, in the order of the branches:
    exec_at_1 and fast_1_at_1 with 95 % intervals, and the difference of exec_at_1 to the first
    strategy at the same size."""
    groups: dict[str, list[Branch]] = {}
    for branch in branches:
        if branch.answers:
            groups.setdefault(label(branch), []).append(branch)
    if not groups:
        return []
    firsts = {
        branch.size: label(branch)
        for branch in reversed(branches)
        if branch.strategy == branches[0].strategy
    }
    pooled = [
        Answers(model=name, candidates=branch.answers.candidates, verdicts=branch.answers.verdicts)
        for name, members in groups.items()
        for branch in members
        if branch.answers
    ]
    frame = answers_frame(pooled)
    resamples = pipeline.benchmark.resamples
    scores = {
        (row.model, row.metric): row
        for row in score(frame, ks=(1,), ps=(1.0,), resamples=resamples)
        if row.track == TRACK
    }
    pairs = [
        (firsts[members[0].size], name)
        for name, members in groups.items()
        if firsts.get(members[0].size) not in (None, name)
    ]
    pairs = [pair for pair in pairs if pair[0] in groups]
    differences = {
        row.model: row
        for row in (
            compare_all(frame, pairs=pairs, ks=(1,), ps=(), resamples=resamples) if pairs else []
        )
        if row.track == TRACK and row.metric == "exec"
    }
    return [_row(name, members, scores, differences.get(name)) for name, members in groups.items()]


def label(branch: Branch) -> str:
    return branch.strategy if branch.size is None else f"{branch.strategy} {branch.size}"


def _row(
    name: str, members: Sequence[Branch], scores: dict[tuple[str, str], Any], difference: Any
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "strategy": members[0].strategy,
        "size": members[0].size,
        "seeds": len(members),
    }
    row["rows"] = max(branch.rows or 0 for branch in members)
    for metric, named in (("exec", "exec_at_1"), ("fast_1", "fast_1_at_1")):
        found = scores[name, metric]
        row |= {named: found.value, f"{named}_lower": found.lower, f"{named}_upper": found.upper}
    row |= {
        "difference": None,
        "difference_lower": None,
        "difference_upper": None,
        "p_holm": None,
        "baseline": None,
    }
    if difference:
        row |= {
            "difference": difference.difference,
            "difference_lower": difference.lower,
            "difference_upper": difference.upper,
        }
        row |= {"p_holm": difference.p_holm, "baseline": difference.baseline}
    return row


def print_ablation(data: dict[str, Any]) -> None:
    """The end of an ablation on a terminal."""
    import sys

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 140, markup=False, highlight=False)
    if data["strategies"]:
        table = Table(title=f"concur ablate: {data['name']}")
        for name in (
            "strategy",
            "size",
            "rows",
            "seeds",
            "exec_at_1",
            "fast_1_at_1",
            "exec_at_1 minus the first",
            "p (Holm)",
        ):
            table.add_column(name, justify="left" if name == "strategy" else "right")
        for row in data["strategies"]:
            size = "all" if row["size"] is None else f"{row['size']:,}"
            p = "" if row["p_holm"] is None else f"{row['p_holm']:.3f}"
            cells = [_interval(row, name) for name in ("exec_at_1", "fast_1_at_1", "difference")]
            table.add_row(row["strategy"], size, f"{row['rows']:,}", str(row["seeds"]), *cells, p)
        console.print(table)
        console.print(
            "95 % intervals over tasks, the seeds of a strategy pooled; differences are paired by"
            " task"
        )
    counts = {
        state: sum(branch["state"] == state for branch in data["branches"])
        for state in ("done", "failed", "left_out")
    }
    said = ", ".join(
        f"{count} {state.replace('_', ' ')}" for state, count in counts.items() if count
    )
    console.print(f"{said} of {len(data['branches'])} branches")
    for branch in data["branches"]:
        if branch["state"] != "done":
            console.print(Text(f"  {branch['name']}: {branch['error']}"), soft_wrap=True)
    left = "" if data["budget_gpu_hours"] is None else f" of {hours(data['budget_gpu_hours'])}"
    console.print(f"spent {hours(data['gpu_hours'])}{left}; {data['seconds']:.0f} s")
    for caution in data["cautions"]:
        console.print(Text(f"caution: {caution}"), soft_wrap=True)
    if data["comparison"]:
        print(f"comparison:  {data['comparison']}")
    if data["mlflow_run"]:
        print(
            f"MLflow:      run {data['mlflow_run']} in {data['experiment']}, at"
            f" {data['tracking_uri']}"
        )


def _interval(row: dict[str, Any], name: str) -> str:
    value, lower, upper = row[name], row[f"{name}_lower"], row[f"{name}_upper"]
    sign = "+" if name == "difference" else ""
    if value is None:
        return ""
    return f"{value:{sign}.3f}" + (
        "" if lower is None else f" [{lower:{sign}.3f}, {upper:{sign}.3f}]"
    )
