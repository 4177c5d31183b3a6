"""KernelBench's tasks (https://github.com/ScalingIntelligence/KernelBench), from a Parquet file, a checkout or the hub.

Guarantees: `task_id` = `kernelbench/L{level}/{problem_id}` wherever the tasks come from, in order of level and problem. Rows that are
not tasks are left out with a warning. Does not guarantee that two releases hold the same program under one id: the program is in the
record, and snapshots are addressed by it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from kernels_eval.errors import UsageError
from kernels_eval.records import KernelTask
from tasks.sources.files import read_parquet, read_text, tasks_of_rows
from tasks.sources.hub import is_hub_id, load_rows

HUB_ID = "ScalingIntelligence/KernelBench"
LEVELS = (1, 2, 3, 4)
COLUMNS = ("code", "level", "name", "problem_id")


def load(location: str | Path, levels: Collection[int] | None = None, revision: str | None = None) -> list[KernelTask]:
    """Tasks of `levels` (all where None) from `location`: a Parquet file with the hub's columns (code, level, name, problem_id), the
    folder that holds KernelBench's `level1`, `level2`, ..., or a hub id.

    `revision` is the hub's commit, its newest where None; it means nothing for files. Raises UsageError naming what cannot be read.
    """
    unknown = sorted(set(levels or ()) - set(LEVELS))
    if unknown:
        raise UsageError(f"KernelBench has no level {', '.join(map(str, unknown))}", f"its levels are {', '.join(map(str, LEVELS))}")
    wanted = sorted(set(LEVELS if levels is None else levels))
    path = Path(location).expanduser()
    if path.is_dir():
        rows = list(_folder_rows(path))
    elif path.is_file():
        rows = read_parquet(path, COLUMNS).to_dicts()
    elif is_hub_id(location):
        rows = [row for level in wanted for row in load_rows(str(location), f"level_{level}", revision, COLUMNS)]
    else:
        raise UsageError(f"{path} does not exist", f"give a Parquet file, a folder that holds level1, level2, ..., or the hub id {HUB_ID}")
    chosen = [row for row in rows if row["level"] in wanted or row["level"] is None]
    return sorted(tasks_of_rows(chosen, _task, str(location)), key=_order)


def _task(row: dict[str, Any]) -> KernelTask:
    level, problem = row["level"], row["problem_id"]
    if level is None or problem is None:
        raise UsageError(f"{row['name']!r} has no level or no problem_id")
    return KernelTask(
        task_id=f"kernelbench/L{level}/{problem}", name=row["name"], code=row["code"], source="kernelbench", level=level
    )  # fmt: skip


def _order(task: KernelTask) -> tuple[int, int]:
    _, level, problem = task.task_id.split("/")
    return int(level.removeprefix("L")), int(problem)


def _folder_rows(root: Path) -> Iterator[dict[str, Any]]:
    """Rows of `level{n}/{problem_id}_{name}.py`, as the repository lays them out."""
    folders = {int(match[1]): path for path in root.iterdir() if path.is_dir() and (match := re.fullmatch(r"level_?(\d+)", path.name))}
    if not folders:
        raise UsageError(f"{root} holds no level folder", "give the folder that holds level1, level2, ... (KernelBench in the repository)")
    for level, folder in folders.items():
        for file in folder.glob("*.py"):
            if match := re.match(r"(\d+)_", file.name):
                yield {"code": read_text(file), "level": level, "name": file.stem, "problem_id": int(match[1])}
