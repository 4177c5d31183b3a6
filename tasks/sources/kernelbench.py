"""KernelBench's tasks (https://github.com/ScalingIntelligence/KernelBench), from a Parquet file, a
checkout or the hub.

`task_id` = `kernelbench/L{level}/{problem_id}`, in order of both; rows that are not tasks (left
out), and hub programs that differ from the release we measured, give a warning.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path

from kernels_eval.errors import UsageError
from kernels_eval.records import Json, KernelTask
from tasks.sources.config import TasksConfig
from tasks.sources.files import number_of, read_parquet, read_text, tasks_of_rows
from tasks.sources.hub import is_hub_id, load_rows
from tasks.typed import typed

HUB_ID = "ScalingIntelligence/KernelBench"
LEVELS = (1, 2, 3, 4)
COLUMNS = ("code", "level", "name", "problem_id")
NEEDED = ("code", "level", "problem_id")

CONTENT = {
    1: "3b26c421fefce1d4c0bf0fc14b16661b",
    2: "3013275055360efb5599c4ac2988fd17",
    3: "bc3133995b3154809e2cda92d0acb016",
    4: "65d0df59be8a68ac8384714d746ad6e7",
}
"""What each level of the release of 270 tasks that our measurements are of holds (`content_of`): a
commit says less, for it can be of other files as well."""


def from_config(config: TasksConfig) -> list[KernelTask]:
    return load(config.location or HUB_ID, config.levels, config.revision, config.precision)


def load(
    location: str | Path,
    levels: Collection[int] | None = None,
    revision: str | None = None,
    precision: str = "fp32",
) -> list[KernelTask]:
    """Tasks of `levels` (None: all) from a table with the hub's columns (code, level, name,
    problem_id), a checkout or its level folders, or a hub id.

    `precision` fp16 or bf16 is KernelBench's option: a constant after each program has the verifier
    cast floating inputs and parameters, also of candidates. `revision` is the hub's commit (None:
    newest). Hub levels that differ from `CONTENT` give a warning. Raises UsageError naming what
    cannot be read.
    """
    wanted = sorted(set(LEVELS if levels is None else levels))
    if unknown := [str(level) for level in wanted if level not in LEVELS]:
        raise UsageError(
            f"KernelBench has no level {', '.join(unknown)}",
            f"its levels are {', '.join(map(str, LEVELS))}",
        )
    path = Path(location).expanduser()
    if path.is_dir():
        rows = list(_folder_rows(path))
    elif path.is_file():
        rows = typed(read_parquet(path, NEEDED, COLUMNS[2:3]), path).to_dicts()
        for row in rows:
            row |= {name: number_of(row[name]) for name in NEEDED[1:]}
    elif is_hub_id(location):
        rows = []
        for level in wanted:
            of_level = load_rows(str(location), f"level_{level}", revision, COLUMNS)
            _compare(of_level, level, f"{location} at revision {revision or 'newest'}")
            rows += of_level
    else:
        raise UsageError(
            f"{path} does not exist",
            f"give a Parquet file, a folder that holds level1, level2, ..., or the hub id {HUB_ID}",
        )
    chosen = [row for row in rows if row["level"] in (*wanted, None)]
    if precision != "fp32":
        constant = f'\n\nPRECISION = "{precision}"\n'
        chosen = [row | {"code": row["code"] + constant} for row in chosen if row["code"]]
    return sorted(
        tasks_of_rows(chosen, task_of, str(location)),
        key=lambda task: (task.level, int(task.task_id.rpartition("/")[2])),
    )


def content_of(rows: Collection[Json]) -> str:
    """Digest of a level's numbers and programs, by number: the first 32 hex digits of SHA-256."""
    digest = hashlib.sha256()
    for number, code in sorted((row["problem_id"], row["code"]) for row in rows):
        digest.update(f"{number}\0{code}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:32]


def _compare(rows: Collection[Json], level: int, where: str) -> None:
    whole = [row for row in rows if row["problem_id"] is not None and row["code"] is not None]
    if content_of(whole) != CONTENT[level]:
        warnings.warn(
            f"level {level} of {where} differs from the release of the published and recorded"
            " numbers: do not compare results with them",
            stacklevel=3,
        )


def task_of(row: Json) -> KernelTask:
    """A row's task. Raises UsageError without level or number."""
    level, problem = row["level"], row["problem_id"]
    if level is None or problem is None:
        raise UsageError(f"{row.get('name')!r} has no level or no problem_id")
    return KernelTask(
        task_id=f"kernelbench/L{level}/{problem}",
        name=row.get("name") or f"problem_{problem}",
        code=row["code"],
        source="kernelbench",
        level=level,
    )


def _folder_rows(root: Path) -> Iterator[Json]:
    """Rows of `level{n}/{problem_id}_{name}.py`."""
    folders = _level_folders(root)
    if not folders:
        raise UsageError(
            f"{root} holds no level folder",
            "give the folder that holds level1, level2, ... (KernelBench in the repository)",
        )
    for file in (file for folder in folders for file in folder.glob("*.py")):
        if number := re.match(r"\d+(?=_)", file.name):
            yield {
                "code": read_text(file),
                "level": _level_of(file.parent),
                "name": file.stem,
                "problem_id": int(number[0]),
            }


def _level_of(folder: Path) -> int:
    found = re.fullmatch(r"level_?(\d+)", folder.name)
    return int(found[1]) if found else 0


def is_checkout(path: Path) -> bool:
    return bool(_level_folders(path))


def _level_folders(path: Path) -> list[Path]:
    near = [path.resolve(), *path.glob("level*"), *path.glob("KernelBench/level*")]
    return [folder for folder in near if folder.is_dir() and _level_of(folder)]
