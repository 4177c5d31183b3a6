"""`concur benchmark`: verdicts that are there already in, scores out: Exec and fast_p at pass@k,
each with its interval, level by level.

Guarantees: nothing is sampled or verified; the numbers are those of `tasks.benchmark.scoring`;
every group of tasks is scored with and, where it holds any, without the tasks that are known to be
degenerate; what the verdicts cannot support (pass@10 of 8 samples, fast_1 where no time was
recorded) is null, and a note says so. Verdicts of two devices are refused, as speedups on them do
not compare.

Does not guarantee that two tables are of one protocol: a table that another harness wrote is scored
as it is, and `--label` should say so.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kernels_eval.errors import UsageError
from kernels_eval.records import Reason
from tasks.curation.source import Files, Source, columns_of, name_of
from tasks.sources.files import shown

if TYPE_CHECKING:
    import polars as pl

SCHEMA_VERSION = 1
OF_VERDICTS = (
    "candidate_id",
    "task_id",
    "status",
    "reason",
    "outputs_match",
    "timing",
    "correctness",
    "custom_kernels",
    "device",
)
OF_CANDIDATES = ("candidate_id", "task_id", "generator", "model", "sample_index")
NEEDED = ("task_id", "status")
KS, PS = (1, 5, 10), (0.0, 0.5, 0.8, 1.0, 1.2, 1.5, 2.0)
LEVEL = re.compile(r"kernelbench/L(\d+)/")
WORDS_FIRST = ("tasks", "model", "track", "against")
AGAINST = {"eager": "eager", "compile": "torch.compile"}
WORDS = {"custom_kernel": "custom kernel", "any": "any"}


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
    """Scores as plain data: `scores` (rows of tasks.benchmark.scoring.ScoreRow with `group` and
    `degenerate`), `groups`, `notes`.

    Places are what `tasks.curation.source.Source` reads. A model is the candidates' `generator` (or
    column `model`), `label` where they name none. Levels come from `tasks` (anything
    tasks.sources.tables.load reads), the snapshot of the tasks, or KernelBench's ids. Rates are
    shares in [0, 1], speedups ratios. Raises UsageError for what cannot be read, candidates that
    are there twice, tasks that are not in `tasks`, and verdicts of several devices where `device`
    does not choose one.
    """
    from tasks.benchmark.scoring import baselines_of, excluded_tasks, score, uncompiled_tasks
    from tasks.sources.degenerate import degenerate_tasks

    if candidates and not verdicts:
        raise UsageError("--candidates without --verdicts", "give both, or neither")
    source = Source(verdicts, candidates, root)
    frame = _of_one_device(_read(source, label), device, name_of(source.verdicts))
    levels = _levels(frame, source, tasks)
    known, notes = degenerate_tasks(), [*_notes(frame, ks)]
    if uncompiled := uncompiled_tasks(frame):
        notes.append(
            f"Scores against torch.compile leave out {len(uncompiled)} tasks without such a"
            f" baseline: {', '.join(uncompiled[:5])}."
        )
    baselines, asked = (
        baselines_of(frame),
        {
            "ks": tuple(ks),
            "ps": tuple(ps),
            "resamples": resamples,
        },
    )
    rows, groups = [], []
    for group, of_group in _groups(frame, levels):
        suspects = sorted(set(of_group["task_id"]) & known.keys())
        for which, part in _with_and_without(of_group, suspects):
            timed = _timed(part)
            for row in (
                row for baseline in baselines for row in score(part, baseline=baseline, **asked)
            ):
                if (
                    row.model not in timed
                    and row.metric.startswith("fast_")
                    and row.metric != "fast_0"
                ):
                    row = row.model_copy(
                        update={"value": None, "lower": None, "upper": None, "interval": None}
                    )
                rows.append({"group": group, "degenerate": which, **row.model_dump()})
        facts = {
            "group": group,
            "tasks": of_group["task_id"].n_unique(),
            "samples": of_group.height,
        }
        groups.append(
            facts | {"degenerate_tasks": suspects, "task_errors": excluded_tasks(of_group)}
        )
    named = sorted(set(frame["device"].drop_nulls()) - {""})
    return {
        "schema_version": SCHEMA_VERSION,
        "verdicts": name_of(source.verdicts),
        "label": label,
        "devices": named,
        "groups": groups,
        "scores": rows,
        "notes": notes,
        "degenerate_tasks": {
            name: known[name] for name in sorted(set(frame["task_id"]) & known.keys())
        },
    }


def parsed_numbers(text: str, option: str, kind: type[int] | type[float]) -> list[Any]:
    """ "1,5,10" as numbers, each once. Raises UsageError for anything else, ks below 1 and ps below
    0."""
    try:
        found = list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        found = []
    if not found or any(
        not math.isfinite(value) or value < (1 if kind is int else 0) for value in found
    ):
        example = "1,5,10" if kind is int else "0,0.5,1,1.5,2"
        raise UsageError(
            f"{option} {shown(text)!r} is not a list of numbers"
            f" {'above 0' if kind is int else 'from 0'}",
            f"such as {example}",
        )
    return found


# -- reading ---------------------------------------------------------------------------------------


def _read(source: Source, label: str | None) -> pl.DataFrame:
    """One row a verdict with the columns that scoring reads; those that the tables lack are
    null."""
    import polars as pl

    where = name_of(source.verdicts)
    if isinstance(source.verdicts, Files):
        ids = columns_of(source.verdicts, ["candidate_id"])
        if (
            "candidate_id" in ids.columns
            and not ids.is_empty()
            and (twice := ids.filter(ids["candidate_id"].is_duplicated())).height
        ):
            raise UsageError(
                f"{where} holds {twice.height} rows of candidates that are there more than once,"
                f" such as {shown(twice['candidate_id'][0])}",
                "give every candidate one verdict: the latest, or those of one run",
            )
    frame = source.read(OF_VERDICTS, OF_CANDIDATES)
    if missing := [name for name in NEEDED if name not in frame.columns]:
        raise UsageError(
            f"{where} has no column {', '.join(missing)}",
            "give verdicts as verification or `concur verify-batch` wrote them",
        )
    if frame.is_empty():
        raise UsageError(f"{where} has no row", "give the verdicts of a run that is finished")
    absent = {
        "reason": pl.String,
        "outputs_match": pl.Boolean,
        "timing": pl.Struct({"speedup": pl.Float64}),
        "device": pl.String,
    }
    frame = frame.with_columns(
        pl.lit(None, kind).alias(name) for name, kind in absent.items() if name not in frame.columns
    )
    named = [pl.col(name) for name in ("generator", "model") if name in frame.columns]
    model = pl.coalesce(*named, pl.lit(label or "unnamed")) if named else pl.lit(label or "unnamed")
    # 'custom_kernels' and 'correctness' stay where both are there: rules of scoring may read them
    return frame.with_columns(model.alias("model"))


def _of_one_device(frame: pl.DataFrame, device: str | None, where: str) -> pl.DataFrame:
    """Verdicts of one device, and those that no device was needed for."""
    import polars as pl

    there = Counter(name for name in frame["device"] if name)
    if device is not None:
        if device not in there:
            raise UsageError(
                f"{where} holds no verdict of {shown(device)!r}",
                f"its devices: {', '.join(map(shown, there)) or 'none named'}",
            )
        return frame.filter(pl.col("device").is_null() | pl.col("device").is_in(["", device]))
    if len(there) > 1:
        counts = ", ".join(f"{shown(name)} ({count})" for name, count in there.most_common())
        raise UsageError(
            f"{where} holds verdicts of {len(there)} devices: {counts}",
            "speedups do not compare: choose one with --device NAME",
        )
    return frame


def _levels(frame: pl.DataFrame, source: Source, tasks: str | None) -> Mapping[str, int]:
    """The level of every task that has one."""
    wanted = set(frame["task_id"])
    if tasks is not None:
        from tasks.sources.tables import load

        found = {task.task_id: task.level for task in load(tasks, wanted)}
        if missing := sorted(wanted - found.keys()):
            raise UsageError(
                f"{len(missing)} of {len(wanted)} tasks are not in {shown(tasks)}, such as"
                f" {shown(missing[0])}",
                "give the tasks that were verified, or leave out --tasks",
            )
    elif source.tasks is not None:
        found = dict(
            source.tasks.read(columns=["task_id", "level"], unique="task_id")
            .select("task_id", "level")
            .iter_rows()
        )
    else:
        found = {name: int(match[1]) for name in wanted if (match := LEVEL.match(name))}
    return {name: level for name, level in found.items() if level is not None}


def _groups(frame: pl.DataFrame, levels: Mapping[str, int]) -> list[tuple[str, pl.DataFrame]]:
    """All tasks, then each level where there are several."""
    import polars as pl

    there = sorted({levels[name] for name in set(frame["task_id"]) if name in levels})
    if len(there) < 2:
        return [
            (
                (
                    f"level {there[0]}"
                    if there
                    and len(levels.keys() & set(frame["task_id"])) == frame["task_id"].n_unique()
                    else "all"
                ),
                frame,
            )
        ]
    of_level = {
        level: [name for name, found in levels.items() if found == level] for level in there
    }
    return [
        ("all", frame),
        *(
            (f"level {level}", frame.filter(pl.col("task_id").is_in(names)))
            for level, names in of_level.items()
        ),
    ]


def _with_and_without(
    frame: pl.DataFrame, suspects: Sequence[str]
) -> list[tuple[str, pl.DataFrame]]:
    import polars as pl

    if not suspects:
        return [("none there", frame)]
    return [("with", frame), ("without", frame.filter(~pl.col("task_id").is_in(list(suspects))))]


def _timed(frame: pl.DataFrame) -> set[str]:
    """Models of which a speedup is known, or no correct sample that could have one."""
    import polars as pl

    correct = frame.filter(pl.col("status") == "correct")
    untimed = set(correct["model"]) - set(
        correct.filter(pl.col("timing").struct.field("speedup").is_not_null())["model"]
    )
    return set(frame["model"]) - untimed


def _notes(frame: pl.DataFrame, ks: Sequence[int]) -> list[str]:
    """What a reader must know of these verdicts, a sentence each."""
    import polars as pl

    said, timed = [], _timed(frame)
    counts = frame.group_by("model", "task_id").len()
    tasks = frame["task_id"].n_unique()
    for (model,), group in counts.group_by("model", maintain_order=True):
        name, least, most = shown(model), int(group["len"].min()), int(group["len"].max())  # type: ignore[arg-type]
        if group.height < tasks:
            said.append(
                f"{name} has no sample on {tasks - group.height} of {tasks} tasks: its scores are"
                " of the others."
            )
        if least < most:
            said.append(
                f"{name} has {least} to {most} samples a task: pass@k needs k of every task."
            )
        if over := [str(k) for k in ks if k > least]:
            said.append(
                f"pass@{', pass@'.join(over)} of {name} is not there: a task has {least} samples."
            )
        if model not in timed:
            said.append(
                f"No reference time was recorded for {name}: fast_p above p = 0 and speedups are"
                " not there."
            )
    if "custom_kernels" not in frame.columns:
        said.append(
            "These verdicts do not say whether a custom kernel did the work: both tracks are the"
            " same."
        )
    silent = frame.filter(
        pl.col("outputs_match").is_null(), pl.col("reason") == Reason.NO_CUSTOM_KERNEL.value
    ).height
    if silent:
        said.append(
            f"{silent} verdicts do not say whether outputs without a custom kernel were right: the"
            " track `any` counts them as wrong."
        )
    return sorted(dict.fromkeys(said))


# -- showing ---------------------------------------------------------------------------------------


def columns_shown(data: Mapping[str, Any]) -> list[tuple[str, int | None]]:
    """The metrics of the table: Exec and fast_1 at every k that any model supports, and the
    geometric mean."""
    there = {(row["metric"], row["k"]) for row in data["scores"] if row["value"] is not None}
    ks = sorted({k for _, k in there if k is not None})
    wanted = (
        [("exec", k) for k in ks] + [("fast_1", k) for k in ks] + [("geometric_mean_speedup", None)]
    )
    return [each for each in wanted if each in there]


def table_of(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Names of columns and rows of text: a row for each group, model, track and baseline, with and
    without degenerate tasks."""
    columns = columns_shown(data)
    names = [*WORDS_FIRST, "n", *(_heading(metric, k) for metric, k in columns)]
    cells: dict[
        tuple[str, str, str, str, str], dict[tuple[str, int | None], Mapping[str, Any]]
    ] = {}
    for row in data["scores"]:
        key = (row["group"], row["degenerate"], row["model"], row["track"], row["baseline"])
        cells.setdefault(key, {})[row["metric"], row["k"]] = row
    rows = []
    for (group, degenerate, model, track, baseline), found in cells.items():
        some = next(iter(found.values()))
        where = group + (" without degenerate" if degenerate == "without" else "")
        rows.append(
            [
                where,
                shown(model),
                WORDS[track],
                AGAINST[baseline],
                f"{some['tasks']} x {some['samples'] / max(some['tasks'], 1):.3g}",
            ]
        )
        rows[-1] += [_cell(found.get(column)) for column in columns]
    return names, rows


def print_scores(data: Mapping[str, Any]) -> None:
    """The table on a terminal, the interval under each number, and the notes."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False)
    names, rows = table_of(data)
    table = Table()
    for number, name in enumerate(names):
        table.add_column(Text(name), justify="left" if number < len(WORDS_FIRST) else "right")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    devices = ", ".join(map(shown, data["devices"])) or "no device named"
    console.print(
        Text(f"{shown(data['label'] or data['verdicts'])}, {devices}; 95 % intervals over tasks")
    )
    console.print(table)
    for note in data["notes"]:
        console.print(f"- {note}", soft_wrap=True)
    for name, why in data["degenerate_tasks"].items():
        console.print(f"- {name} is degenerate: {why}", soft_wrap=True)


def markdown_of(data: Mapping[str, Any]) -> list[str]:
    """The same table as lines of Markdown."""
    names, rows = table_of(data)
    rules = ["---"] * len(WORDS_FIRST) + ["---:"] * (len(names) - len(WORDS_FIRST))
    lines = [f"| {' | '.join(names)} |", f"| {' | '.join(rules)} |"]
    return [*lines, *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)]


def _heading(metric: str, k: int | None) -> str:
    name = {"exec": "Exec", "geometric_mean_speedup": "speedup"}.get(metric, metric)
    return f"{name}@{k}" if k is not None else name


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None or row["value"] is None:
        return "-"
    scale, form = (1, ".2f") if row["metric"] == "geometric_mean_speedup" else (100, ".1f")
    value = format(scale * row["value"], form)
    return (
        value
        if row["lower"] is None
        else f"{value} ({scale * row['lower']:{form}} to {scale * row['upper']:{form}})"
    )
