"""Scores of existing verdicts as plain data and as a table, level by level.

Guarantees: the numbers are those of `tasks.benchmark.scoring`; every group of tasks is scored with
and, where it holds any, without the tasks that are known to be degenerate; what the verdicts cannot
support (pass@10 of 8 samples, fast_1 where no time was recorded) is null, and a note says so. Does
not guarantee that two tables are of one protocol.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import polars as pl

from kernels_eval.records import Json, Reason, Row
from tasks.benchmark.samples import (
    TRACKS,
    baselines_of,
    excluded_tasks,
    remarks,
    uncompiled_tasks,
)
from tasks.benchmark.scoring import GEOMETRIC_MEAN, score
from tasks.benchmark.tables import pivoted
from tasks.reporting.text import interval
from tasks.sources.degenerate import degenerate_tasks
from tasks.sources.files import shown
from tasks.tables import CORRECT

SCHEMA_VERSION = 1
HEADER = ("tasks", "model", "track", "against")
AGAINST = {"eager": "eager", "compile": "torch.compile"}
NAMES = {"exec": "Exec", GEOMETRIC_MEAN: "speedup"}
SAME_TRACKS = (
    "These verdicts do not say whether a custom kernel did the work: both tracks are the same."
)


def tabulate(
    frame: pl.DataFrame,
    levels: Mapping[str, int],
    *,
    ks: Sequence[int],
    ps: Sequence[float],
    resamples: int,
) -> Json:
    """Return `scores` (rows of ScoreRow with `group` and `degenerate`), `groups` and `notes`.

    `frame` has one row per verdict with `model` and `device`; `levels` maps task_id to its level.
    Rates are shares in [0, 1], speedups ratios. Raises UsageError as `score` does.
    """
    known, notes = degenerate_tasks(), sorted(dict.fromkeys(_notes(frame, ks)))
    if uncompiled := uncompiled_tasks(frame):
        notes.append(
            f"Scores against torch.compile leave out {len(uncompiled)} tasks without such a"
            f" baseline: {', '.join(uncompiled[:5])}."
        )
    rows, groups = [], []
    for group, own in _groups(frame, levels).items():
        suspects = sorted(set(own["task_id"]) & known.keys())
        parts = {"with" if suspects else "none there": own}
        if suspects:
            parts["without"] = own.filter(~pl.col("task_id").is_in(suspects))
        for which, part in parts.items():
            untimed = _untimed(part)
            for baseline in baselines_of(frame):
                for row in score(part, baseline=baseline, ks=ks, ps=ps, resamples=resamples):
                    told = {"group": group, "degenerate": which, **row.model_dump()}
                    needs_time = row.metric.startswith("fast_") and row.metric != "fast_0"
                    if needs_time and row.model in untimed:
                        told |= dict.fromkeys(("value", "lower", "upper", "interval"))
                    rows.append(told)
        groups.append(
            {
                "group": group,
                "tasks": own["task_id"].n_unique(),
                "samples": own.height,
                "degenerate_tasks": suspects,
                "task_errors": excluded_tasks(own),
            }
        )
    notes += remarks(frame).values()
    tasks = sorted(set(frame["task_id"]) & known.keys())
    return {
        "schema_version": SCHEMA_VERSION,
        "devices": sorted(set(frame["device"].drop_nulls()) - {""}),
        "groups": groups,
        "scores": rows,
        "notes": notes,
        "degenerate_tasks": {name: known[name] for name in tasks},
    }


def table_of(data: Row) -> tuple[list[str], list[list[str]]]:
    """Return names of columns and rows of text.

    There is a row for each group, model, track and baseline, with and without degenerate tasks;
    columns are Exec and fast_1 at every k that any model supports, and the geometric mean.
    """
    there = {(row["metric"], row["k"]) for row in data["scores"] if row["value"] is not None}
    ks = sorted({k for _, k in there if k is not None})
    wanted = [*((metric, k) for metric in ("exec", "fast_1") for k in ks), (GEOMETRIC_MEAN, None)]
    columns = {each: _column(*each) for each in wanted if each in there}
    found = pivoted(
        [*HEADER, "n"],
        [row for row in data["scores"] if (row["metric"], row["k"]) in columns],
        _line,
        lambda row: columns[row["metric"], row["k"]],
        _cell,
        absent="-",
        first=columns.values(),
    )
    return list(found.header), [list(map(str, row)) for row in found.rows]


def _column(metric: str, k: int | None) -> str:
    return NAMES.get(metric, metric) + (f"@{k}" if k else "")


def _line(row: Row) -> tuple[str, ...]:
    where = row["group"] + (" without degenerate" if row["degenerate"] == "without" else "")
    samples = f"{row['tasks']} x {row['samples'] / max(row['tasks'], 1):.3g}"
    track = row["track"].replace("_", " ")
    return where, shown(row["model"]), track, AGAINST[row["baseline"]], samples


def _cell(row: Row) -> str:
    if row["value"] is None:
        return "-"
    form = ".2f" if row["metric"] == GEOMETRIC_MEAN else ".1p"
    return interval(row["value"], row["lower"], row["upper"], form)


def _groups(frame: pl.DataFrame, levels: Mapping[str, int]) -> dict[str, pl.DataFrame]:
    """All tasks, then each level where there are several."""
    tasks = set(frame["task_id"])
    there = sorted({levels[name] for name in tasks & levels.keys()})
    if len(there) == 1 and tasks <= levels.keys():
        return {f"level {there[0]}": frame}
    found = {"all": frame}
    for level in there if len(there) > 1 else ():
        own = [name for name, of in levels.items() if of == level]
        found[f"level {level}"] = frame.filter(pl.col("task_id").is_in(own))
    return found


def _untimed(frame: pl.DataFrame) -> set[str]:
    """Models that have correct samples, but no speedup of any."""
    correct = frame.filter(CORRECT)
    timed = correct.filter(pl.col("timing").struct.field("speedup").is_finite())
    return set(correct["model"]) - set(timed["model"])


def _notes(frame: pl.DataFrame, ks: Sequence[int]) -> Iterator[str]:
    """What a reader must know of these verdicts, a sentence each."""
    untimed, tasks = _untimed(frame), frame["task_id"].n_unique()
    samples = pl.col("len")
    counts = (
        frame.group_by("model", "task_id")
        .len()
        .group_by("model")
        .agg(tasks=pl.len(), least=samples.min(), most=samples.max())
    )
    for model, answered, least, most in counts.iter_rows():
        name = shown(model)
        over = [str(k) for k in ks if k > least]
        if answered < tasks:
            left = f"{tasks - answered} of {tasks} tasks"
            yield f"{name} has no sample on {left}: its scores are of the others."
        if least < most:
            yield f"{name} has {least} to {most} samples per task: pass@k needs k of every task."
        if over:
            yield f"pass@{', pass@'.join(over)} of {name} is not there: a task has {least} samples."
        if model in untimed:
            yield (
                f"No reference time was recorded for {name}: fast_p above p = 0 and speedups are"
                " not there."
            )
    if "custom_kernels" not in frame.columns:
        yield SAME_TRACKS
    unjudged = pl.col("outputs_match").is_null() & (
        pl.col("reason") == Reason.NO_CUSTOM_KERNEL.value
    )
    if silent := frame.filter(unjudged).height:
        yield (
            f"{silent} verdicts do not say whether outputs without a custom kernel were right: the"
            f" track `{TRACKS[0]}` counts them as wrong."
        )
