"""Parquet tables of the user: which files a location means, and the tasks in them by their columns.

Guarantees: of a table that cannot be used, one UsageError names the file, the columns it has and
those that are wanted; tasks come out checked as `tasks.sources.files` checks them. Only the tasks
that are asked for are checked: a broken row that is not needed is no error. Does not guarantee the
order of a folder's rows beyond the names of its files.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

from kernels_eval.errors import UsageError
from kernels_eval.records import KernelTask
from tasks.sources import files, kernelbench, tritonbench
from tasks.sources.files import columns_of, rows_of, shown

TASK_FORMS: dict[tuple[str, ...], Callable[[Path], list[KernelTask]] | None] = {
    ("task_id", "code"): None,
    kernelbench.COLUMNS: kernelbench.load,
    tritonbench.COLUMNS: tritonbench.load,
    files.COLUMNS: files.load,
}
"""Columns that make a table of tasks, and what loads such a table where not `load` itself. The
first that fits is taken."""


def part_files(location: str | Path) -> list[Path]:
    """The Parquet files of a location: a file, a folder (its `*.parquet`, not searched deeper) or a
    glob; by name.

    Raises UsageError where there is none.
    """
    path = Path(location).expanduser()
    if path.is_file():
        return [path]
    names = glob.glob(str(path / "*.parquet" if path.is_dir() else path), recursive=True)
    if found := [Path(name) for name in sorted(names) if Path(name).is_file()]:
        return found
    missing = "holds no Parquet file" if path.is_dir() else "does not exist"
    raise UsageError(
        f"{shown(location)} {missing}",
        "give a Parquet file, a folder of them, or a quoted glob such as 'DIR/part-*.parquet'",
    )


def unusable(
    path: Path, columns: Sequence[str], kind: str, forms: Iterable[Sequence[str]]
) -> UsageError:
    """What is said of a table that has none of the wanted sets of columns."""
    wanted = "; or ".join(", ".join(form) for form in forms)
    return UsageError(
        f"{shown(path)} is no table of {kind}: its columns are"
        f" {shown(', '.join(columns), 300) or 'none'}",
        f"wanted: {wanted}",
    )


def load(location: str | Path, wanted: Collection[str] | None = None) -> list[KernelTask]:
    """Tasks of Parquet tables, of a .py file, or of a folder of .py files or of KernelBench; only
    those of `wanted` where it is given.

    A table has `task_id` and `code` (other columns of KernelTask as well, where they are there),
    KernelBench's columns, TritonBench-T's, or `name` and `code`. Raises UsageError for what cannot
    be read, and where one task_id stands for two different programs.
    """
    path = Path(location).expanduser()
    if path.suffix == ".py" or (path.is_dir() and not any(path.glob("*.parquet"))):
        found = kernelbench.load(path) if kernelbench.is_checkout(path) else files.load(path)
        return [task for task in found if wanted is None or task.task_id in wanted]
    tasks: dict[str, KernelTask] = {}
    for part in part_files(location):
        for task in _of_part(part, wanted):
            if tasks.setdefault(task.task_id, task) != task:
                raise UsageError(
                    f"{shown(part)} gives task {task.task_id!r} a second program",
                    "give every task one program",
                )
    return list(tasks.values())


def _of_part(path: Path, wanted: Collection[str] | None) -> Iterator[KernelTask]:
    columns = columns_of(path)
    form = next((form for form in TASK_FORMS if set(form) <= set(columns)), None)
    if form is None:
        raise unusable(path, columns, "tasks", TASK_FORMS)
    if loader := TASK_FORMS[form]:
        yield from (task for task in loader(path) if wanted is None or task.task_id in wanted)
        return
    fields = [name for name in KernelTask.model_fields if name in columns]
    for number, row in enumerate(rows_of(path, fields)):
        given = {key: value for key, value in row.items() if value is not None}
        if "task_id" in given:
            given["task_id"] = str(given["task_id"])
        if wanted is None or given.get("task_id") in wanted:
            named = {"name": given.get("task_id"), **given}
            yield files.checked_task(named, f"{shown(path)} row {number}")
