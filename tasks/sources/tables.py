"""The user's tables (Parquet, JSON lines, CSV): their files and tasks. One UsageError names an
unusable table's file, its columns and the wanted ones."""

from __future__ import annotations

import glob
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

from kernels_eval.errors import UsageError
from kernels_eval.exchange.trace_set import TraceSet, is_trace_set
from kernels_eval.records import KernelTask
from tasks.progress import caution
from tasks.sources import files, kernelbench, kernelbook
from tasks.sources.files import columns_of, local, number_of, rows_of, shown
from tasks.sources.foreign import Foreign, of_file, of_folder
from tasks.sources.hub import is_hub_id
from tasks.typed import typed_row

TASK_FORMS: dict[tuple[str, ...], Callable[[Path], list[KernelTask]] | None] = {
    ("task_id", "code"): None,
    kernelbench.NEEDED: kernelbench.load,
    files.COLUMNS: files.load,
}
"""Columns that make a table of tasks, and what loads such a table where not `load` itself. The
first that fits is taken."""


BINARY = (".parquet", *files.ARROW)
SUFFIXES = (*BINARY, *files.LINES)


def part_files(location: str | Path) -> list[Path]:
    """The tables of a file, a folder (its Parquet, else Arrow, JSON lines or CSV files, else those
    in its folders, as data sets of the hub have them) or a glob; by name. Raises UsageError where
    there is none."""
    path = local(location)
    if path.is_file():
        return [path]
    inside = (*(f"*{suffix}" for suffix in SUFFIXES), *(f"*/*{suffix}" for suffix in BINARY))
    patterns = [path / each for each in inside] if path.is_dir() else [path]
    for pattern in map(str, patterns):
        try:
            names = sorted(glob.glob(pattern, recursive=True))
        except RecursionError:
            fix = "name folders above the files in place of **"
            raise UsageError(f"{shown(location)} leads too deep", fix) from None
        if found := [Path(name) for name in names if Path(name).is_file()]:
            return found
    missing = "holds no table (Parquet, JSON lines or CSV)" if path.is_dir() else "does not exist"
    raise UsageError(
        f"{shown(location)} {missing}",
        "give a file, a folder of them, or a quoted glob such as 'DIR/part-*.parquet'",
    )


def holds_tables(path: Path) -> bool:
    """Whether `part_files` reads a file of this folder."""
    own = {each.suffix for each in path.iterdir()}
    deeper = (each for suffix in BINARY for each in path.glob(f"[!.]*/*{suffix}"))
    return bool(own & {*SUFFIXES}) or (own.isdisjoint((".py", ".txt")) and any(deeper))


def on_hub(location: str | Path) -> bool:
    """Whether a location is a hub id: `owner/name` without a local folder `owner`, which would make
    it a path, perhaps mistyped."""
    path = local(location)
    known = path.suffix in (*SUFFIXES, ".py")
    return is_hub_id(str(location)) and not (known or path.parent.exists())


def unusable(
    path: object, columns: Sequence[str], kind: str, forms: Iterable[Sequence[str]]
) -> UsageError:
    wanted = "; or ".join(", ".join(form) for form in forms)
    return UsageError(
        f"{shown(path)} is no table of {kind}: "
        + (f"its columns are {shown(', '.join(columns), 300)}" if columns else "it has no rows"),
        f"wanted: {wanted}",
    )


def load(location: str | Path, wanted: Collection[str] | None = None) -> list[KernelTask]:
    """Tasks of tables, .py files, KernelBench, definitions (FlashInfer-Bench's, SOL-ExecBench's) or
    the hub (KernelBook's, or KernelBench's form); with `wanted`, only these task_ids or names.

    A table has `task_id` and `code` (and KernelTask's other columns), KernelBench's columns, or
    `name` and `code`. Raises UsageError for unreadable input, and a task_id of two programs.
    """
    path = local(location)
    tasks: dict[str, KernelTask] = {}
    for where, task in _found(location, path, wanted):
        if tasks.setdefault(task.task_id, task) != task:
            raise UsageError(
                f"{shown(where)} gives task {task.task_id!r} a second program",
                "give every task one program",
            )
    return list(tasks.values())


def _found(
    location: str | Path, path: Path, wanted: Collection[str] | None
) -> Iterator[tuple[object, KernelTask]]:
    if on_hub(location):
        levels = {number_of(name) for name in wanted or () if name.startswith("kernelbench/L")}
        if str(location) == kernelbook.HUB_ID:
            found = kernelbook.load(kernelbook.HUB_ID, kernelbook.PINNED)
        else:
            found = kernelbench.load(location, [each for each in levels if each] or None)
    elif is_trace_set(path):
        held = TraceSet(path)
        yield from ((path, x) for x in held.tasks() if _is_wanted(x.task_id, x.name, wanted))
        tell_left_out(held)
        return
    elif foreign_folder := of_folder(path):
        yield from ((path, x) for x in _of_map(foreign_folder, wanted))
        return
    elif path.is_dir() and kernelbench.is_checkout(path):
        found = kernelbench.load(path)
    elif path.suffix == ".py" or (path.is_dir() and not holds_tables(path)):
        found = files.load(path)
    else:
        for part in part_files(location):
            yield from ((part, task) for task in _of_part(part, wanted))
        return
    yield from ((path, task) for task in found if _is_wanted(task.task_id, task.name, wanted))


def tell_left_out(held: TraceSet) -> None:
    """Caution about what could not be converted."""
    for why, count in held.left_out.most_common(3):
        caution(f"{shown(held.root)}: {count} left out: {shown(why)}")


def _of_map(foreign: Foreign, wanted: Collection[str] | None) -> Iterator[KernelTask]:
    found = (task for each in foreign.found() for task in each.tasks)
    yield from (task for task in found if _is_wanted(task.task_id, task.name, wanted))


def _is_wanted(task_id: object, name: object, wanted: Collection[str] | None) -> bool:
    return wanted is None or task_id in wanted or name in wanted


def _of_part(path: Path, wanted: Collection[str] | None) -> Iterator[KernelTask]:
    columns = columns_of(path)
    form = next((form for form in TASK_FORMS if set(form) <= set(columns)), None)
    if form is None:
        foreign = of_file(path)
        if foreign.by is None:
            raise unusable(path, columns, "tasks", TASK_FORMS)
        yield from _of_map(foreign, wanted)
        return
    if loader := TASK_FORMS[form]:
        found = loader(path)
        yield from (task for task in found if _is_wanted(task.task_id, task.name, wanted))
        return
    fields = [name for name in KernelTask.model_fields if name in columns]
    for number, row in enumerate(rows_of(path, fields)):
        where = f"{shown(path)} row {number}"
        given = {key: value for key, value in typed_row(row, where).items() if value is not None}
        if _is_wanted(given.get("task_id"), given.get("name"), wanted):
            named = {"name": given.get("task_id"), **given}
            yield files.checked_task(named, where)
