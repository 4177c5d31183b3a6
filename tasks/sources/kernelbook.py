"""KernelBook's tasks (https://huggingface.co/datasets/GPUMODE/KernelBook), from Parquet or the hub.

`task_id` = `kernelbook/{uuid}`; `init_form` is "args_kwargs", because `get_init_inputs()` returns
`[args, kwargs]`. Rows that are not tasks are left out with a warning.
"""

from __future__ import annotations

from pathlib import Path

from kernels_eval.errors import UsageError
from kernels_eval.records import Json, KernelTask
from tasks.sources.config import TasksConfig
from tasks.sources.files import read_parquet, tasks_of_rows
from tasks.sources.hub import is_hub_id, load_rows
from tasks.typed import typed

HUB_ID = "GPUMODE/KernelBook"
PINNED = "1576375bc92745b490e1cdf2fce01eba76d9f847"
"""The revision under the MIT licence; later ones changed it."""

COLUMNS = ("uuid", "entry_point", "python_code")


def from_config(config: TasksConfig) -> list[KernelTask]:
    return load(config.location or HUB_ID, config.revision or PINNED, limit=config.limit)


def load(
    location: str | Path, revision: str = PINNED, limit: int | None = None
) -> list[KernelTask]:
    """The first `limit` tasks (None: all) of a hub id or a Parquet file with its columns (uuid,
    entry_point, python_code).

    `revision` is the hub's commit, ignored for files. Raises UsageError naming what cannot be read.
    """
    path = Path(location).expanduser()
    if path.is_file():
        rows = typed(read_parquet(path, COLUMNS), path).to_dicts()
    elif is_hub_id(location) and not path.exists():
        rows = load_rows(str(location), "train", revision, COLUMNS)
    else:
        raise UsageError(
            f"{path} is not a file",
            f"give a Parquet file with columns {', '.join(COLUMNS)}, or the hub id {HUB_ID}",
        )
    return tasks_of_rows(rows, _task, str(location), limit)


def _task(row: Json) -> KernelTask:
    if row["uuid"] is None:
        raise UsageError(f"{row['entry_point']!r} has no uuid")
    return KernelTask(
        task_id=f"kernelbook/{row['uuid']}",
        name=row["entry_point"],
        code=row["python_code"],
        entry_point=row["entry_point"],
        init_form="args_kwargs",
        source="kernelbook",
    )
