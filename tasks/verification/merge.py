"""Verdicts of several machines as one table: one row per candidate and GPU; conflicting verdicts
and ids of two candidates are refused. Verdicts that reached no device are of their set's GPU."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from kernels_eval.errors import UsageError
from tasks.scores import nested
from tasks.sources.files import shown

KEY = ("candidate_id", "device")
CANDIDATE = ("task_id", "code", "generator")
"""Columns that an id stands for."""
SAID = ("status", "reason", "verdict_key", "speedup")
"""Rows that agree in these are one."""


def merged(sets: Mapping[str, pl.DataFrame]) -> pl.DataFrame:
    """The rows of all named sets, in order. Raises UsageError for conflicts, and for sets without
    ids, statuses or a known GPU."""
    frame = pl.concat(
        [_of_one_set(name, rows) for name, rows in sets.items()], how="diagonal_relaxed"
    )
    of_rows = [name for name in CANDIDATE if name in frame.columns]
    _refuse_two(
        frame, ["candidate_id"], of_rows, "stands for two candidates", "give each an id of its own"
    )
    speedup = nested(frame, "timing", "speedup") if "timing" in frame.columns else pl.lit(None)
    said = [name for name in SAID if name in frame.columns or name == "speedup"]
    _refuse_two(
        frame.with_columns(speedup=speedup),
        list(KEY),
        said,
        "has two verdicts",
        "leave one of the sets out, or verify the candidate anew",
    )
    return frame.unique(list(KEY), keep="first", maintain_order=True).drop("_set")


def _of_one_set(name: str, rows: pl.DataFrame) -> pl.DataFrame:
    if missing := {"candidate_id", "status"} - set(rows.columns):
        raise UsageError(
            f"{shown(name)} has no column {', '.join(sorted(missing))}",
            "give verdicts as verification or `concur verify-batch` wrote them",
        )
    device = pl.lit("") if "device" not in rows.columns else pl.col("device").fill_null("")
    rows = rows.with_columns(
        pl.col("candidate_id").cast(pl.String), device=device, _set=pl.lit(name)
    )
    there = rows.filter(pl.col("device") != "")["device"].unique().sort().to_list()
    if len(there) != 1 and rows["device"].is_in([""]).any():
        named = f"names {len(there)} GPUs" if there else "names no GPU"
        raise UsageError(
            f"{shown(name)} has verdicts without a device and {named}",
            "give the sets of each GPU by themselves, with the GPU's name in the column device",
        )
    return rows.with_columns(device=pl.col("device").replace("", there[0] if there else ""))


def _refuse_two(frame: pl.DataFrame, key: list[str], told: list[str], what: str, fix: str) -> None:
    if not told:
        return
    grouped = frame.select(*key, "_set", _said=pl.struct(told)).group_by(key, maintain_order=True)
    twice = grouped.agg(pl.col("_said").n_unique().alias("_count"), "_said", "_set")
    for row in twice.filter(pl.col("_count") > 1).head(1).iter_rows(named=True):
        one, *others = zip(row["_said"], row["_set"], strict=True)
        other = next(each for each in others if each[0] != one[0])
        name = next(each for each in told if one[0][each] != other[0][each])
        said = (f"{name} {shown(values[name], 80)} in {shown(at)}" for values, at in (one, other))
        where = f" on {shown(row['device'])}" if "device" in row else ""
        problem = f"candidate {shown(row['candidate_id'])} {what}{where}: {', '.join(said)}"
        raise UsageError(problem, fix)
