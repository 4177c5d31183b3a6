"""TritonBench-T's operators (https://github.com/thunlp/TritonBench) as tasks.

Guarantees: one task an operator, `task_id` = `tritonbench/{name}`, `level` its difficulty where
that is known; its one forward call makes all of the operator's test calls
(`functions` says how), so an answer is correct exactly where every call is, and what
is refused or left out is listed with its reason. Nothing is run here. Does not guarantee the scores
of TritonBench's own scripts: inputs are drawn anew for every seed here, and compared more strictly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from experiments.tritonbench.functions import Adapted, Refused, adapt
from kernels_eval.errors import UsageError
from kernels_eval.records import Json, KernelTask
from kernels_eval.tables import table_beside
from tasks.sources.config import TasksConfig
from tasks.sources.files import existing, read_rows

COLUMNS = ("name", "code_with_tests")
OPTIONAL_COLUMNS = ("difficulty",)
SOURCE = "tritonbench"
NOT_JUDGED: dict[str, dict[str, str]] = table_beside(__file__, "not_judged.toml")
"""Test calls that were run on a CPU and cannot be judged, and why."""


@dataclass(frozen=True)
class Survey:
    """What became of a file's operators: `tasks` in its order, `adapted` by task_id, `refused` by
    name with the reason."""

    tasks: list[KernelTask] = field(default_factory=list)
    adapted: dict[str, Adapted] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def load_source(config: TasksConfig) -> list[KernelTask]:
    """The task source `tritonbench`: the operators at `tasks.location`. Raises UsageError."""
    if config.location is None:
        raise UsageError(
            "tasks.source is 'tritonbench' but tasks.location is not set",
            "--set tasks.location=PATH",
        )
    return load(config.location)


def load(location: str | Path) -> list[KernelTask]:
    """The tasks of those operators that can be adapted. Raises UsageError naming what cannot be
    read, and where none can."""
    found = survey(location)
    if not found.tasks:
        raise UsageError(
            f"{location} holds no operator that becomes a task:"
            f" {next(iter(found.refused.values()), 'it is empty')}",
            _FORM,
        )
    return found.tasks


def survey(location: str | Path) -> Survey:
    """Every operator of a Parquet or JSONL file with the columns name and code_with_tests, or of a
    folder of .py files, one per operator: a reference function, a line of `#`, and a test function
    that calls it.

    Raises UsageError naming what cannot be read, and a name that occurs twice.
    """
    found = Survey()
    for row in operator_rows(location):
        name = row["name"]
        task_id = f"{SOURCE}/{name}"
        if task_id in found.adapted or name in found.refused:
            raise UsageError(
                f"{location} holds {name} twice", "give every operator a name of its own"
            )
        try:
            adapted = adapt(name, row["code_with_tests"], NOT_JUDGED.get(name, {}))
        except Refused as refused:
            found.refused[name] = str(refused)
            continue
        task = KernelTask(
            task_id=task_id,
            name=adapted.operator,
            code=adapted.code,
            source=SOURCE,
            level=_difficulty(row.get("difficulty")),
        )
        found.tasks.append(task)
        found.adapted[task_id] = adapted
    return found


# -- reading ---------------------------------------------------------------------------------------

_FORM = (
    "an operator is a reference function, a line of #, and a test function that calls it and keeps"
    " what it returns"
)


def operator_rows(location: str | Path) -> Iterator[Json]:
    """Rows with the columns name and code_with_tests. Raises UsageError as `survey` does."""
    for where, row in read_rows(existing(location), COLUMNS, OPTIONAL_COLUMNS):
        if missing := [name for name in COLUMNS if not _is_text(row.get(name))]:
            raise UsageError(
                f"{where} has no {', '.join(missing)}",
                f"a row has {' and '.join(COLUMNS)}, as text",
            )
        yield row


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _difficulty(value: object) -> int | None:
    try:
        return None if value is None else int(str(value))
    except ValueError:
        return None
