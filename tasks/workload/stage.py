"""Tasks in, what each computes and moves out, once for each snapshot of tasks.

Guarantees: one row a task; tasks with the same program are counted once; a killed run resumes,
and a later run over other tasks pays only for the programs that are new. A task that cannot
be counted has a row that says why, and never ends the stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl

from kernels_eval.records import KernelTask, stable_hash
from tasks.progress import report
from tasks.store import Snapshot, SnapshotRef, fingerprint, known_rows
from tasks.versions import WORKLOAD_VERSION
from tasks.workload.config import WorkloadConfig
from tasks.workload.measure import measured, tasks_of
from tasks.workload.record import WORKLOADS

STAGE = "workloads"
COLUMNS = tuple(name for name in WORKLOADS.names if name not in ("workload_key", "task_id"))


def workload_key(task: KernelTask, config: WorkloadConfig) -> str:
    """Identity of a measurement: the program, the limits and the version of the code that counts
    (not the task's name)."""
    program = [task.code, task.entry_point, task.init_form]
    return stable_hash([*program, config.identity, WORKLOAD_VERSION])


def planned(tasks: SnapshotRef, config: WorkloadConfig) -> Snapshot:
    """The snapshot that `run` with the same arguments fills."""
    return _snapshot(tasks.root, config, [tasks.fingerprint])


def _snapshot(root: str, config: WorkloadConfig, upstream: Sequence[str]) -> Snapshot:
    key = fingerprint(STAGE, config.identity, upstream, WORKLOAD_VERSION)
    return Snapshot(root, STAGE, key)


def run(tasks: SnapshotRef, config: WorkloadConfig) -> SnapshotRef:
    """A finished snapshot of WORKLOADS, one row a task. Its manifest counts the tasks by kind and
    by family.

    Raises SandboxError where no sandbox can be started, UsageError where the root cannot be
    written.
    """
    snapshot = planned(tasks, config)
    if snapshot.finished:
        return snapshot.ref
    found = tasks_of(tasks.open().read(unique="task_id").to_dicts())
    _fill(snapshot, [(workload_key(task, config), task) for task in found], config)
    rows = snapshot.read(columns=["task_id", "operator_kind", "families"], unique="task_id")
    kinds = rows["operator_kind"].fill_null("not counted").value_counts()
    families = rows["families"].list.explode(empty_as_null=False).drop_nulls().value_counts()
    extra = {
        "status_counts": dict(sorted(kinds.iter_rows())),
        "family_counts": dict(sorted(families.iter_rows())),
    }
    return snapshot.publish(
        config=config.identity, upstream=[tasks.fingerprint], rows=len(found), extra=extra
    ).ref


def annotate(
    tasks: pl.DataFrame | SnapshotRef, config: WorkloadConfig | None = None, root: str | None = None
) -> pl.DataFrame:
    """The tasks (rows of tasks.tables.TASKS) with the columns COLUMNS beside them.

    For a snapshot, what `run` keeps. With `root`, results of a table are kept there as a snapshot
    of the stage "workloads" too. Raises as `run` does.
    """
    config = config or WorkloadConfig()
    if isinstance(tasks, SnapshotRef):
        key, named = "task_id", tasks.open().read(unique="task_id")
        counted = run(tasks, config).open().read(unique="task_id")
    else:
        key, found = "workload_key", tasks_of(tasks.to_dicts())
        keys = pl.Series(key, [workload_key(task, config) for task in found], dtype=pl.String)
        named = tasks.with_columns(keys)
        counted = _counted(dict(zip(keys, found, strict=True)), config, root)
    named = named.drop(COLUMNS, strict=False)
    counted = counted.select(key, *COLUMNS)
    joined = named.join(counted, on=key, how="left", maintain_order="left")
    return joined.drop("workload_key", strict=False)


def _counted(
    programs: dict[str, KernelTask], config: WorkloadConfig, root: str | None
) -> pl.DataFrame:
    """Rows of WORKLOADS for these programs by key, kept under a root where there is one."""
    if root is None:
        rows = list(_measured(programs, config))
        schema = pl.DataFrame(WORKLOADS.empty_table()).schema
        return pl.DataFrame(rows, schema=schema, orient="row")
    snapshot = _snapshot(root, config, sorted(programs))
    if not snapshot.finished:
        _fill(snapshot, list(programs.items()), config)
        snapshot.publish(config=config.identity, rows=len(programs))
    return snapshot.read(unique="workload_key")


def _fill(snapshot: Snapshot, wanted: list[tuple[str, KernelTask]], config: WorkloadConfig) -> None:
    """A row for each of these tasks (with their keys) that has none yet; only programs that no
    snapshot of the root knows are run."""
    snapshot.recover(WORKLOADS)
    done = snapshot.keys("task_id")
    left: dict[str, list[KernelTask]] = {}
    for key, task in wanted:
        if task.task_id not in done:
            left.setdefault(key, []).append(task)

    def rows() -> Iterator[dict[str, Any]]:
        """From this snapshot, then from others, then measured: what is left when asked."""
        yield from snapshot.read(unique="workload_key").to_dicts()
        keys, own = list(left), snapshot.fingerprint
        yield from known_rows(snapshot.root, STAGE, "workload_key", keys, WORKLOADS, exclude=own)
        programs = {key: tasks[0] for key, tasks in left.items()}
        yield from _measured(programs, config, done=len(dict(wanted)) - len(left))

    with snapshot.journal(WORKLOADS) as add:
        for row in rows():
            for task in left.pop(row["workload_key"], []):
                add(row | {"task_id": task.task_id})


def _measured(
    programs: dict[str, KernelTask], config: WorkloadConfig, done: int = 0
) -> Iterator[dict[str, Any]]:
    """A row of WORKLOADS for each program, as they are done."""
    keys = {id(task): key for key, task in programs.items()}
    total, problems = done + len(programs), 0
    for task, result in measured(programs.values(), config):
        done += 1
        problems += result.workload.problem is not None
        report(STAGE, done, total, f"{problems} could not be run" if problems else "")
        yield {"workload_key": keys[id(task)]} | result.workload.row()
