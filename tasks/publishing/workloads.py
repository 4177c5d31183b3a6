"""What the tasks of a set compute, for its card: operator families and arithmetic intensity.

Numbers are those of the snapshot of workloads that the set was curated with; tasks that could not
be counted are counted as such.
"""

from __future__ import annotations

from kernels_eval.records import Record
from tasks.publishing.lineage import Lineage, select
from tasks.reporting.text import cell, table

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
NUMBERS = ("arithmetic_intensity", "flops", "bytes_min")
NAMES = {
    "arithmetic_intensity": "arithmetic intensity (FLOPs a byte)",
    "flops": "floating-point operations of a call",
    "bytes_min": "bytes that a call must move",
}


class Workloads(Record):
    """Of the `tasks` distinct tasks of a set: how many could be `counted`, how many run each family
    of operators, quantiles by share."""

    tasks: int
    counted: int
    families: dict[str, int]
    quantiles: dict[str, dict[str, float]]


def workloads_of(line: Lineage) -> Workloads | None:
    """The workloads of the tasks in a set. None where it was curated without."""
    import polars as pl

    if line.workloads is None:
        return None
    tasks = select(line.curated, ["task_id"], "task_id").select("task_id")
    rows = tasks.join(
        select(line.workloads, ["task_id", "families", "executed", *NUMBERS], "task_id", tasks),
        on="task_id",
        how="left",
    )
    families = (
        rows["families"].list.explode(empty_as_null=False).drop_nulls().value_counts().iter_rows()
    )
    quantiles = {}
    for name in NUMBERS:
        values = rows[name].cast(pl.Float64).drop_nulls()
        if len(values):
            quantiles[name] = {
                f"{share:g}": float(values.quantile(share, "linear") or 0.0) for share in QUANTILES
            }
    return Workloads(
        tasks=rows.height,
        counted=rows.height - rows["executed"].null_count(),
        families=dict(sorted(families, key=lambda pair: (-pair[1], pair[0]))),
        quantiles=quantiles,
    )


def section(found: Workloads) -> str:
    """The card's words and tables."""
    said = (
        "Counted by running each program once, without storage where that is possible:"
        f" {found.counted:,} of {found.tasks:,} tasks. A task counts under each family of operators"
        " that it runs."
    )
    shares = [
        (cell(name), f"{count:,}", f"{count / max(1, found.counted):.0%}")
        for name, count in found.families.items()
    ]
    parts = [said, table(("family", "tasks", "share"), shares)] if shares else [said]
    if found.quantiles:
        heads = [f"{float(share):.0%}" for share in next(iter(found.quantiles.values()))]
        rows = [
            (NAMES[name], *(f"{value:,.4g}" for value in values.values()))
            for name, values in found.quantiles.items()
        ]
        parts.append(table(("quantile over tasks", *heads), rows))
    return "\n\n".join(parts)
