"""`concur benchmark`: scores existing verdicts by Exec and fast_p at pass@k, each with its
interval, level by level.

Guarantees: nothing is sampled or verified. Verdicts of two devices are refused, as speedups on them
do not compare. Does not guarantee that two tables are of one protocol: a table that another harness
wrote is scored as it is, and `--label` should say so.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kernels_eval.errors import UsageError

if TYPE_CHECKING:
    import polars as pl

    from tasks.curation.source import Source

Number = TypeVar("Number", int, float)
OF_VERDICTS = (
    *("candidate_id", "task_id", "status", "reason", "outputs_match", "timing"),
    *("correctness", "custom_kernels", "device"),
)
OF_CANDIDATES = ("candidate_id", "task_id", "generator", "model", "sample_index")
NEEDED = ("task_id", "status")
KS, PS = (1, 5, 10), (0.0, 0.5, 0.8, 1.0, 1.2, 1.5, 2.0)
LEVEL = re.compile(r"kernelbench/L(\d+)/")


def score_table(
    verdicts: str | None = None,
    candidates: str | None = None,
    *,
    tasks: str | None = None,
    root: str = ".concur",
    label: str | None = None,
    device: str | None = None,
    ks: Sequence[int] = KS,
    ps: Sequence[float] = PS,
    resamples: int = 2000,
) -> dict[str, Any]:
    """Return what `tasks.benchmark.score_table.tabulate` makes of verdicts on disk.

    Places are what `tasks.curation.source.Source` reads. A model is the candidates' `generator` (or
    column `model`), `label` where they name none; verdicts of `concur verify-batch` name it
    themselves, whatever columns its candidates had. Levels come from `tasks` (anything
    tasks.sources.tables.load reads), the snapshot of the tasks, or KernelBench's ids. Raises
    UsageError for what cannot be read, candidates that occur twice, tasks that are not in
    `tasks`, and verdicts of several devices where `device` does not choose one.
    """
    from tasks.benchmark.score_table import tabulate
    from tasks.curation.source import Source
    from tasks.synthesis.inputs import parts_of

    if candidates and not verdicts:
        raise UsageError("--candidates without --verdicts", "give both, or neither")
    if verdicts and candidates and _names_models(verdicts):
        parts_of(candidates)  # it must be there, even so
        candidates = None
    source = Source(verdicts, candidates, root)
    name = verdicts or source.verdicts.path
    frame = _each_once(_of_one_device(_read(source, label), device, name), name)
    levels = _levels(set(frame["task_id"]), source, tasks)
    found = tabulate(frame, levels, ks=ks, ps=ps, resamples=resamples)
    return {"verdicts": name, "label": label, **found}


def parsed_numbers(text: str, option: str, kind: type[Number]) -> list[Number]:
    """Return "1,5,10" as numbers, each once.

    Raises UsageError for anything else, ks below 1 and ps below 0.
    """
    from tasks.sources.files import shown

    least, example = (1, "1,5,10") if kind is int else (0, "0,0.5,1,1.5,2")
    found: list[Number] = []
    with suppress(ValueError):
        found = list(dict.fromkeys(map(kind, text.split(","))))
    if not found or not all(least <= value < math.inf for value in found):
        which = "above 0" if least else "from 0"
        raise UsageError(
            f"{option} {shown(text)!r} is not a list of numbers {which}", f"such as {example}"
        )
    return found


# -- reading ---------------------------------------------------------------------------------------


def _names_models(verdicts: str) -> bool:
    """Whether these are verdicts of verify-batch: its folder, or the table in there."""
    from tasks.sources.files import columns_of

    path = Path(verdicts).expanduser()
    file = path / "verdicts.parquet" if path.is_dir() else path
    return file.is_file() and {"generator", "row"} <= set(columns_of(file))


def _read(source: Source, label: str | None) -> pl.DataFrame:
    """One row per verdict with the columns that scoring reads; those that the tables lack are
    null."""
    import polars as pl

    frame = source.verdict_rows(OF_VERDICTS, OF_CANDIDATES, NEEDED)
    absent: dict[str, Any] = {
        "reason": pl.String,
        "outputs_match": pl.Boolean,
        "timing": pl.Struct({"speedup": pl.Float64}),
        "device": pl.String,
    }
    frame = frame.with_columns(
        pl.lit(None, kind).alias(name) for name, kind in absent.items() if name not in frame.columns
    )
    named = [pl.col(name) for name in ("generator", "model") if name in frame.columns]
    # 'custom_kernels' and 'correctness' stay where both are there: rules of scoring may read them
    return frame.with_columns(model=pl.coalesce(*named, pl.lit(label or "unnamed")))


def _of_one_device(frame: pl.DataFrame, device: str | None, where: str) -> pl.DataFrame:
    """Verdicts of one device, and those that no device was needed for."""
    import polars as pl

    from tasks.sources.files import shown

    there = Counter(name for name in frame["device"] if name)
    if device is not None:
        if device not in there:
            raise UsageError(
                f"{where} has no verdict of {shown(device)!r}",
                f"its devices: {', '.join(map(shown, there)) or 'none named'}",
            )
        return frame.filter(pl.col("device").is_null() | pl.col("device").is_in(["", device]))
    if len(there) > 1:
        counts = ", ".join(f"{shown(name)} ({count})" for name, count in there.most_common())
        raise UsageError(
            f"{where} holds verdicts of {len(there)} devices: {counts}",
            "speedups on different devices are not comparable: choose one with --device NAME",
        )
    return frame


def _each_once(frame: pl.DataFrame, where: str) -> pl.DataFrame:
    """The verdicts, no two of which are on one candidate. Raises UsageError."""
    from tasks.sources.files import shown

    if "candidate_id" in frame.columns:
        column = frame["candidate_id"]
        if (twice := column.filter(column.is_duplicated())).len():
            raise UsageError(
                f"{where} has {twice.len()} rows for candidates that occur more than once,"
                f" such as {shown(twice[0])}",
                "keep one verdict per candidate: the latest, or those of one run",
            )
    return frame


def _levels(wanted: set[str], source: Source, tasks: str | None) -> dict[str, int]:
    """The level of every task that has one."""
    from tasks.sources.files import shown
    from tasks.sources.tables import load

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
