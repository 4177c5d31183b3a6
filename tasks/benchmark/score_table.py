"""Scores of existing verdicts as plain data, level by level. Unsupported values are null with a
note."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from kernels_eval.records import Json
from tasks.benchmark.remarks import remarks
from tasks.scores import (
    BASELINES,
    TRACKS,
    baselines_of,
    excluded_tasks,
    right_samples,
    scores,
    without_values,
)
from tasks.sources.degenerate import degenerate_tasks
from tasks.tables import CORRECT

WITH, WITHOUT, NONE_THERE = "with", "without", "none there"
SAME_TRACKS = (
    "These verdicts do not say whether a custom kernel did the work: both tracks are the same."
)
OTHER_TRACKS = "The track any counts right answers without a kernel of their own, too."
SCORED = ("group", "degenerate", "baseline", "model", "track")
"""What a row of scores is of, beside its k."""
NO_TIME = "no reference time was recorded"


def tabulate(
    frame: pl.DataFrame,
    levels: Mapping[str, int],
    *,
    ks: Sequence[int],
    ps: Sequence[float],
    resamples: int,
) -> Json:
    """Return `scores`, `groups` and `notes`.

    A row of `scores` has group, degenerate, baseline, model, track and k, `right` of its samples,
    and value, lower and upper of each metric of `tasks.scores.scores`. `frame` has one row per
    verdict with `model` and `device`; `levels` maps task_id to level. Raises UsageError as
    `scores` does.
    """
    known = degenerate_tasks()
    groups = _groups(frame, levels)
    members = pl.concat(
        pl.DataFrame({"task_id": tasks}).with_columns(group=pl.lit(group), degenerate=pl.lit(which))
        for group, own in groups.items()
        for which, tasks in _with_and_without(own, known).items()
    )
    by = ("group", "degenerate", "model")
    frames = members.join(frame, on="task_id", maintain_order="left_right")
    rows = pl.concat(
        scores(frames, by=by, ks=ks, ps=ps, track=track, baseline=baseline, resamples=resamples)
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
    right = pl.concat(
        right_samples(frames, by, track, baseline)
        for baseline in baselines_of(frame)
        for track in TRACKS
    )
    keys = [*by, "track", "baseline"]
    rows = rows.join(right, on=keys, how="left", nulls_equal=True, maintain_order="left")
    rows = rows.with_columns(pl.col("right").fill_null(0))
    rows = _without_times(rows, frames, by).sort(
        *(pl.col(name).cast(pl.Enum(values)) for name, values in order.items()),
        maintain_order=True,
    )
    tasks = set(frame["task_id"])
    return {
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
        "scores": _by_k(rows),
        "notes": _notes(frame, rows),
        "degenerate_tasks": {name: known[name] for name in sorted(tasks & known.keys())},
    }


def _by_k(rows: pl.DataFrame) -> list[Json]:
    ks = rows["k"].drop_nulls().unique().sort().to_list()
    found: dict[tuple[object, ...], Json] = {}
    for row in rows.iter_rows(named=True):
        scored = {name: row[name] for name in ("value", "lower", "upper")}
        for k in ks if row["k"] is None else [row["k"]]:
            key = {name: row[name] for name in SCORED} | {"k": k}
            counts = {name: row[name] for name in ("tasks", "samples", "right", "missing")}
            found.setdefault(tuple(key.values()), key | counts)[row["metric"]] = scored
    return list(found.values())


def _groups(frame: pl.DataFrame, levels: Mapping[str, int]) -> dict[str, list[str]]:
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


def _without_times(rows: pl.DataFrame, frame: pl.DataFrame, by: Sequence[str]) -> pl.DataFrame:
    timed = pl.col("timing").struct.field("speedup").is_finite().fill_null(False)
    groups = frame.filter(CORRECT).group_by(by).agg(_timed=timed.any())
    rows = rows.join(groups, on=by, how="left", maintain_order="left")
    needs_time = pl.col("metric").str.starts_with("fast_") & (pl.col("metric") != "fast_0")
    cut = needs_time & ~pl.col("_timed").fill_null(True)
    return without_values(rows, cut, pl.lit(NO_TIME)).drop("_timed")


def _notes(frame: pl.DataFrame, rows: pl.DataFrame) -> list[str]:
    notes = [OTHER_TRACKS if "custom_kernels" in frame.columns else SAME_TRACKS]
    # of the first group: the others lack the same, in other words
    empty = rows.filter(pl.col("why_not") != "", group=rows["group"][0]).sort("model")
    reasons = [
        f"Model {model}: {why}." for model, why in empty.select("model", "why_not").iter_rows()
    ]
    return [*notes, *dict.fromkeys(reasons), *remarks(frame)]
