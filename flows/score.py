"""`concur benchmark`: Exec and fast_p at pass@k of existing verdicts, with intervals, by level."""

from __future__ import annotations

import re
from pathlib import Path

import polars as pl

from flows.lists import parsed_numbers
from kernels_eval.errors import UsageError
from kernels_eval.flags import FLAGS
from kernels_eval.records import Json
from tasks.benchmark.score_table import tabulate
from tasks.curation.source import Source
from tasks.scores import without_fig_leaves
from tasks.sources.files import columns_of, shown
from tasks.sources.tables import load
from tasks.synthesis.inputs import parts_of
from tasks.tables import completed

OF_VERDICTS = (
    *("candidate_id", "task_id", "status", "level", "reason", "outputs_match", "timing"),
    *("correctness", "custom_kernels", "custom_kernel_time_share", "device", "flags"),
)
OF_CANDIDATES = ("candidate_id", "task_id", "generator", "model", "sample_index")
NEEDED = ("task_id", "status")
ABSENT = {
    "reason": pl.String(),
    "outputs_match": pl.Boolean(),
    "timing": pl.Struct({"speedup": pl.Float64}),
    "device": pl.String(),
    "flags": pl.List(pl.String()),
}
"""Columns that a table may lack."""
USUAL_KS = (1, 5, 10)
LEVEL = re.compile(r"kernelbench/L(\d+)/")


def score_table(
    verdicts: str | None = None,
    candidates: str | None = None,
    *,
    tasks: str | None = None,
    root: str = ".concur",
    label: str | None = None,
    device: str | None = None,
    ks: str | None = None,
    ps: str = "0.5,0.8,1,1.2,1.5,2",
    resamples: int = 2000,
    min_kernel_share: float | None = None,
) -> Json:
    """Return `tasks.benchmark.score_table.tabulate` of verdicts on disk.

    A model is the candidates' `generator` (or column `model`), else `label`. Levels come from
    `tasks` (as in tasks.sources.tables.load), the tasks' snapshot, or KernelBench's ids. Without
    `ks` there are those of USUAL_KS for which a model has enough samples of each task. Raises
    UsageError for unreadable input, duplicate candidates, tasks missing from `tasks`, and verdicts
    of several devices without `device`.
    """
    known_ks = ks and parsed_numbers(ks, "--k", int, 1, "1,5,10")
    known_ps = parsed_numbers(ps, "--p", float, 0, "0,0.5,1,1.5,2")
    if candidates and not verdicts:
        raise UsageError("--candidates without --verdicts", "give both, or neither")
    if verdicts and candidates and _names_models(verdicts):
        parts_of(candidates)  # it must be there, even so
        candidates = None
    source = Source(verdicts, candidates, root)
    name = verdicts or source.verdicts.path
    frame = _of_device(_read(source, label), device, name)
    frame = without_fig_leaves(frame, min_kernel_share)
    levels = _levels(set(frame["task_id"]), source, tasks)
    ks_of = known_ks or _supported_ks(frame)
    found = tabulate(frame, levels, ks=ks_of, ps=known_ps, resamples=resamples)
    found["notes"] += _unstable(frame)
    asked = {} if min_kernel_share is None else {"min_kernel_share": min_kernel_share}
    return {"verdicts": name, "label": label, **asked, **found}


def _unstable(frame: pl.DataFrame) -> list[str]:
    """A note on times that the machine disturbed."""
    timed = frame.filter(pl.col("timing").is_not_null())
    if timed.schema["flags"] != pl.List(pl.String):  # another suite's
        return []
    count = timed.filter(pl.col("flags").list.contains("unstable")).height
    if not count:
        return []
    return [f"{count:,} of {timed.height:,} timed verdicts are unstable: {FLAGS['unstable']}."]


def _supported_ks(frame: pl.DataFrame) -> list[int]:
    samples = frame.group_by("model", "task_id").len()
    most = samples.group_by("model").agg(pl.col("len").min())["len"].max()
    return [k for k in USUAL_KS if k == 1 or (isinstance(most, int) and k <= most)]


def _names_models(verdicts: str) -> bool:
    path = Path(verdicts).expanduser()
    file = path / "verdicts.parquet" if path.is_dir() else path
    return file.is_file() and {"generator", "row"} <= set(columns_of(file))


def _read(source: Source, label: str | None) -> pl.DataFrame:
    frame = source.verdict_rows(OF_VERDICTS, OF_CANDIDATES, NEEDED)
    if nulls := frame["task_id"].null_count():
        raise UsageError(
            f"{nulls} of {frame.height} rows have no task_id", "give every row its own"
        )
    named = [pl.col(name) for name in ("generator", "model") if name in frame.columns]
    return completed(frame, ABSENT).with_columns(
        model=pl.coalesce(*named, pl.lit(label or "unnamed")),
    )


def _of_device(frame: pl.DataFrame, device: str | None, where: str) -> pl.DataFrame:
    if device is None:
        return frame
    known = frame["device"].drop_nulls().unique().to_list()
    if device not in known:
        raise UsageError(
            f"{where} has no verdict of {shown(device)!r}",
            f"its devices: {', '.join(shown(name) for name in known if name) or 'none named'}",
        )
    return frame.filter(pl.col("device").is_null() | pl.col("device").is_in(["", device]))


def _levels(wanted: set[str], source: Source, tasks: str | None) -> dict[str, int]:
    found: dict[str, int | None]
    if tasks is not None:
        found = {task.task_id: task.level for task in load(tasks, wanted)}
        if missing := sorted(wanted - found.keys()):
            raise UsageError(
                f"{len(missing)} of {len(wanted)} tasks are not in {shown(tasks)}, such as"
                f" {shown(missing[0])}",
                "give the tasks that were verified, or leave out --tasks",
            )
    elif source.tasks is not None:
        names = ("task_id", "level")
        found = dict(source.tasks.read(columns=names, unique="task_id").select(names).iter_rows())
    else:
        found = {name: int(match[1]) for name in wanted if (match := LEVEL.match(name))}
    return {name: level for name, level in found.items() if level is not None}
