"""Tasks in, the same tasks with their workloads out; what was once counted is kept beside the other snapshots.

Guarantees: one row a task in the order given; tasks with the same program are counted once; with a root, a killed run goes on where it was
and a later run over other tasks pays only for the new ones. A task that cannot be counted has a row that says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import polars as pl

from kernels_eval.records import KernelTask, stable_hash
from tasks.progress import report
from tasks.store import Snapshot, SnapshotRef, code_version, fingerprint, known_rows
from tasks.workload.measure import WorkloadConfig, measured, tasks_of
from tasks.workload.record import WORKLOADS, Workload

STAGE = "workloads"
CODE = (
    "tasks.workload", "tasks.operators", "kernels_eval.workload", "kernels_eval.checks.costs", "kernels_eval.checks.inputs",
    "kernels_eval.checks.operators",
)  # fmt: skip
COLUMNS = tuple(name for name in WORKLOADS.names if name not in ("workload_key", "task_id"))


def workload_key(task: KernelTask, config: WorkloadConfig, code: str) -> str:
    """Identity of a measurement: the program, the limits and the code that counts (not the task's name)."""
    return stable_hash([task.code, task.entry_point, task.init_form, config.identity, code])


def annotate(tasks: pl.DataFrame | SnapshotRef, config: WorkloadConfig | None = None, root: str | None = None) -> pl.DataFrame:
    """The tasks (rows of tasks.schemas.TASKS) with the columns COLUMNS beside them.

    With `root`, and for a snapshot always (its own root then), results are kept there as a snapshot of the stage "workloads". Raises
    SandboxError where no sandbox can be started, UsageError where the root cannot be written.
    """
    config = config or WorkloadConfig()
    if isinstance(tasks, SnapshotRef):
        root = root or tasks.root
        tasks = tasks.open().read(unique="task_id")
    code = code_version(*CODE)
    found = tasks_of(tasks.to_dicts())
    keys = [workload_key(task, config, code) for task in found]
    programs = dict(zip(keys, found, strict=True))
    rows = list(_measured(programs, config)) if root is None else _kept(programs, config, root, code)
    counted = pl.DataFrame(
        [{name: row[name] for name in ("workload_key", *COLUMNS)} for row in rows], schema=_polars_schema(), orient="row"
    ).unique(subset="workload_key", keep="first")
    named = tasks.drop([name for name in COLUMNS if name in tasks.columns]).with_columns(pl.Series("workload_key", keys, dtype=pl.String))
    return named.join(counted, on="workload_key", how="left", maintain_order="left").drop("workload_key")


def _kept(programs: dict[str, KernelTask], config: WorkloadConfig, root: str, code: str) -> list[dict[str, Any]]:
    snapshot = Snapshot(root, STAGE, fingerprint(STAGE, config.identity, sorted(programs), code))
    if not snapshot.finished:
        snapshot.recover(WORKLOADS)
        there = snapshot.keys("workload_key")
        with snapshot.journal(WORKLOADS) as add:
            missing = [key for key in programs if key not in there]
            for row in known_rows(root, STAGE, "workload_key", missing, WORKLOADS, exclude=snapshot.fingerprint):
                add(row)
                there.add(row["workload_key"])
            left = {key: task for key, task in programs.items() if key not in there}
            for row in _measured(left, config, done=len(programs) - len(left)):
                add(row)
        snapshot.publish(config=config.identity, rows=len(programs))
    return snapshot.read(unique="workload_key").to_dicts()


def _measured(programs: dict[str, KernelTask], config: WorkloadConfig, done: int = 0) -> Iterator[dict[str, Any]]:
    """A row of WORKLOADS for each program, as they are done."""
    keys: dict[int, str] = {id(task): key for key, task in programs.items()}
    total, problems = done + len(programs), 0
    for task, result in measured(programs.values(), config):
        done += 1
        problems += result.workload.problem is not None
        report(STAGE, done, total, f"{problems} could not be run" if problems else "")
        yield {"workload_key": keys[id(task)]} | _row(result.workload)


def _row(workload: Workload) -> dict[str, Any]:
    dump: Callable[..., dict[str, Any]] = workload.model_dump
    return dump(mode="json")


def _polars_schema() -> dict[str, Any]:
    empty = pl.from_arrow(WORKLOADS.empty_table())
    assert isinstance(empty, pl.DataFrame)
    return {name: kind for name, kind in empty.schema.items() if name != "task_id"}
