"""Scores of existing verdicts as plain data and as a table, level by level.

Guarantees: every group of tasks is scored with and, where it holds any, without the tasks that are
known to be degenerate; what the verdicts cannot support (pass@10 of 8 samples, fast_1 where no time
was recorded) is null, and a note says so. Does not guarantee that two tables are of one protocol.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import polars as pl

from kernels_eval.records import Json, Reason, Row
from tasks.benchmark.remarks import remarks
from tasks.benchmark.shown import FAST, pivoted
from tasks.reporting.text import interval
from tasks.scores import (
    BASELINES,
    EXEC,
    GEOMETRIC_MEAN,
    TRACKS,
    baselines_of,
    excluded_tasks,
    scores,
    uncompiled_tasks,
)
from tasks.sources.degenerate import degenerate_tasks
from tasks.sources.files import shown
from tasks.tables import CORRECT

SCHEMA_VERSION = 2
HEADER = ("tasks", "model", "track", "against")
AGAINST = {"eager": "eager", "compile": "torch.compile"}
NAMES = {EXEC: "Exec", GEOMETRIC_MEAN: "speedup"}
WITH, WITHOUT, NONE_THERE = "with", "without", "none there"
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
    """Return `scores` (rows of `tasks.scores.scores` with `group` and `degenerate`), `groups` and
    `notes`.

    `frame` has one row per verdict with `model` and `device`; `levels` maps task_id to its level.
    Raises UsageError as `scores` does.
    """
    known = degenerate_tasks()
    groups = _groups(frame, levels)
    members = pl.concat(
        pl.DataFrame({"task_id": tasks}).with_columns(group=pl.lit(group), degenerate=pl.lit(which))
        for group, own in groups.items()
        for which, tasks in _with_and_without(own, known).items()
    )
    by = ("group", "degenerate", "model")
    grouped = members.join(frame, on="task_id", maintain_order="left_right")
    rows = pl.concat(
        scores(
            grouped,
            by=by,
            ks=ks,
            ps=ps,
            track=track,
            baseline=baseline,
            resamples=resamples,
        )
        for baseline in baselines_of(frame)
        for track in TRACKS
    )
    order = {
        "group": list(groups),
        "degenerate": [NONE_THERE, WITH, WITHOUT],
        "baseline": BASELINES,
        "model": frame["model"].unique(maintain_order=True),
        "track": TRACKS,
    }
    rows = rows.sort(
        *(pl.col(name).cast(pl.Enum(values)) for name, values in order.items()),
        maintain_order=True,
    )
    tasks = set(frame["task_id"])
    return {
        "schema_version": SCHEMA_VERSION,
        "devices": sorted(set(frame["device"].drop_nulls()) - {""}),
        "groups": [
            {
                "group": group,
                "tasks": len(own),
                "samples": frame.filter(pl.col("task_id").is_in(own)).height,
                "degenerate_tasks": sorted(set(own) & known.keys()),
                "task_errors": excluded_tasks(frame.filter(pl.col("task_id").is_in(own))),
            }
            for group, own in groups.items()
        ],
        "scores": _without_times(rows, _untimed(grouped, *by)).to_dicts(),
        "notes": [*sorted(dict.fromkeys(_notes(frame, ks))), *remarks(frame).values()],
        "degenerate_tasks": {name: known[name] for name in sorted(tasks & known.keys())},
    }


def table_of(data: Row) -> tuple[list[str], list[list[str]]]:
    """Return names of columns and rows of text.

    There is a row for each group, model, track and baseline, with and without degenerate tasks;
    columns are Exec and fast_1 at every k that any model supports, and the geometric mean.
    """
    there = {(row["metric"], row["k"]) for row in data["scores"] if row["value"] is not None}
    ks = sorted({k for _, k in there if k is not None})
    wanted = [*((metric, k) for metric in (EXEC, FAST) for k in ks), (GEOMETRIC_MEAN, None)]
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
    where = row["group"] + (" without degenerate" if row["degenerate"] == WITHOUT else "")
    samples = f"{row['tasks']} x {row['samples'] / max(row['tasks'], 1):.3g}"
    track = row["track"].replace("_", " ")
    return where, shown(row["model"]), track, AGAINST[row["baseline"]], samples


def _cell(row: Row) -> str:
    if row["value"] is None:
        return "-"
    form = ".2f" if row["metric"] == GEOMETRIC_MEAN else ".1p"
    return interval(row["value"], row["lower"], row["upper"], form)


def _groups(frame: pl.DataFrame, levels: Mapping[str, int]) -> dict[str, list[str]]:
    """Tasks of all, then of each level where there are several."""
    tasks = sorted(set(frame["task_id"]))
    there = sorted({levels[name] for name in tasks if name in levels})
    if len(there) == 1 and set(tasks) <= levels.keys():
        return {f"level {there[0]}": tasks}
    found = {"all": tasks}
    for level in there if len(there) > 1 else ():
        found[f"level {level}"] = [name for name in tasks if levels.get(name) == level]
    return found


def _with_and_without(tasks: list[str], degenerate: Mapping[str, str]) -> dict[str, list[str]]:
    sound = [name for name in tasks if name not in degenerate]
    if len(sound) == len(tasks):
        return {NONE_THERE: tasks}
    return {WITH: tasks, WITHOUT: sound}


def _untimed(frame: pl.DataFrame, *by: str) -> pl.DataFrame:
    """Groups that have correct samples, but no speedup of any."""
    timed = pl.col("timing").struct.field("speedup").is_finite().fill_null(False)
    correct = frame.filter(CORRECT).with_columns(speedup=timed)
    return correct.group_by(by).agg(pl.col("speedup").any()).filter(~pl.col("speedup"))


def _without_times(rows: pl.DataFrame, untimed: pl.DataFrame) -> pl.DataFrame:
    """Without a time there is no fast_p above p = 0."""
    by = untimed.columns[:-1]
    rows = rows.join(untimed, on=by, how="left", maintain_order="left")
    needs_time = pl.col("metric").str.starts_with("fast_") & (pl.col("metric") != "fast_0")
    cut = needs_time & pl.col("speedup").is_not_null()
    return rows.with_columns(
        pl.when(~cut).then(name).alias(name) for name in ("value", "lower", "upper")
    ).drop("speedup")


def _notes(frame: pl.DataFrame, ks: Sequence[int]) -> Iterator[str]:
    """What a reader must know of these verdicts, a sentence each."""
    untimed = _untimed(frame, "model")["model"].to_list()
    tasks = frame["task_id"].n_unique()
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
    if uncompiled := uncompiled_tasks(frame):
        yield (
            f"Scores against torch.compile leave out {len(uncompiled)} tasks without such a"
            f" baseline: {', '.join(uncompiled[:5])}."
        )
