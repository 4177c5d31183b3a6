"""Parquet tables of the user: which files a location means, and the tasks in them by their columns.

Guarantees: of a table that cannot be used, one UsageError names the file, the columns it has and
those that are wanted; tasks come out checked as `tasks.sources.files` checks them. Only the tasks
that are asked for are checked: a broken row that is not needed is no error. Does not guarantee the
order of a folder's rows beyond the names of its files.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from kernels_eval.errors import UsageError
from kernels_eval.records import KernelTask
from tasks.sources import files, kernelbench, tritonbench
from tasks.sources.files import columns_of, rows_of, shown

TASK_FORMS = (("task_id", "code"), kernelbench.COLUMNS, tritonbench.COLUMNS, files.COLUMNS)
"""Columns that make a table of tasks. The first that fits is taken."""


def part_files(location: str | Path) -> list[Path]:
    """The Parquet files of a location: a file, a folder (its `*.parquet`, not searched deeper) or a
    glob; by name.

    Raises UsageError where there is none.
    """
    path = Path(location).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = sorted(part for part in path.glob("*.parquet") if not part.name.startswith("."))
    else:
        found = sorted(
            Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()
        )
    if not found:
        raise UsageError(
            (
                f"{shown(location)} holds no Parquet file"
                if path.is_dir()
                else f"{shown(location)} does not exist"
            ),
            "give a Parquet file, a folder of them, or a quoted glob such as 'DIR/part-*.parquet'",
        )
    return found


def unusable(
    path: Path, columns: Sequence[str], kind: str, forms: Sequence[Sequence[str]]
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
        is_kernelbench = path.is_dir() and any(
            re.fullmatch(r"level_?\d+", entry.name) for entry in path.iterdir()
        )
        found = kernelbench.load(path) if is_kernelbench else files.load(path)
        return [task for task in found if wanted is None or task.task_id in wanted]
    tasks: dict[str, KernelTask] = {}
    for part in part_files(location):
        for task in _of_part(part, wanted):
            if tasks.setdefault(task.task_id, task) != task:
                raise UsageError(
                    f"{shown(part)} holds another program for task {task.task_id!r}",
                    "give every task one program",
                )
    return list(tasks.values())


def _of_part(path: Path, wanted: Collection[str] | None) -> Iterator[KernelTask]:
    columns = columns_of(path)
    form = next((form for form in TASK_FORMS if set(form) <= set(columns)), None)
    if form is None:
        raise unusable(path, columns, "tasks", TASK_FORMS)
    if form is not TASK_FORMS[0]:
        loaded = {kernelbench.COLUMNS: kernelbench.load, tritonbench.COLUMNS: tritonbench.load}.get(
            form, files.load
        )(path)
        yield from (task for task in loaded if wanted is None or task.task_id in wanted)
        return
    for number, row in enumerate(
        rows_of(path, [name for name in KernelTask.model_fields if name in columns])
    ):
        given = {key: value for key, value in row.items() if value is not None}
        given |= {"task_id": str(given["task_id"])} if "task_id" in given else {}
        if wanted is not None and given.get("task_id") not in wanted:
            continue
        yield files.checked_task(
            {"name": given.get("task_id"), **given}, f"{shown(path)} row {number}"
        )
