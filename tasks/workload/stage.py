"""Tasks in, their workloads out, one row per task. Equal programs are counted once; failures are
rows with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import polars as pl
import pyarrow as pa

from kernels_eval.grouping import grouped
from kernels_eval.records import Json, KernelTask, stable_hash
from kernels_eval.sandbox.trees import temporary_tree
from tasks.progress import report
from tasks.sources.stage import keep, read_tasks
from tasks.store import Snapshot, SnapshotRef, known_rows
from tasks.tables import WORKLOADS
from tasks.versions import WORKLOAD_VERSION
from tasks.workload.measure import measured

STAGE = "workloads"
KEY, TASK, *COLUMNS = WORKLOADS.names
Programs = Mapping[str, KernelTask]


def workload_key(task: KernelTask) -> str:
    """A measurement's identity: the program and the counting version, not the task's name."""
    return stable_hash([task.code, task.entry_point, task.init_form, WORKLOAD_VERSION])


def planned(tasks: SnapshotRef) -> Snapshot:
    return Snapshot.planned(STAGE, {}, [tasks], WORKLOAD_VERSION)


def run(tasks: SnapshotRef) -> SnapshotRef:
    """A finished snapshot of WORKLOADS, one row per task; its manifest counts kinds and families.

    Raises SandboxError where no sandbox starts, UsageError where the root cannot be written.
    """
    snapshot = planned(tasks)
    if snapshot.finished:
        return snapshot.ref
    found = read_tasks(tasks)

    def counted(programs: Programs) -> Iterator[Json]:
        for task, workload in measured(programs.values()):
            yield workload.row() | {KEY: workload_key(task)}

    fill(snapshot, WORKLOADS, [(workload_key(task), task) for task in found], counted)
    rows = snapshot.read(columns=[TASK, "operator_kind", "families"], unique=TASK)
    kinds = rows["operator_kind"].fill_null("not counted").value_counts()
    families = rows["families"].list.explode(empty_as_null=False).drop_nulls().value_counts()
    extra = {
        "status_counts": dict(sorted(kinds.iter_rows())),
        "family_counts": dict(sorted(families.iter_rows())),
    }
    return snapshot.publish(config={}, rows=len(found), extra=extra).ref


def annotate(tasks: pl.DataFrame, root: str | None = None) -> pl.DataFrame:
    """The tasks (tasks.tables.TASKS rows; other columns stay) with COLUMNS beside them, which are
    kept under `root`, where given. Raises as `run` does."""
    fields = [name for name in KernelTask.model_fields if name in tasks.columns]
    found = [KernelTask.model_validate(row) for row in tasks.select(fields).to_dicts()]
    with temporary_tree("workloads-") as scratch:
        counted = run(keep(found, root or str(scratch), {})).open().read(unique=TASK)
    return tasks.drop(COLUMNS, strict=False).join(
        counted.select(TASK, *COLUMNS), on=TASK, how="left", maintain_order="left"
    )


def fill(
    snapshot: Snapshot,
    schema: pa.Schema,
    wanted: Sequence[tuple[str, KernelTask]],
    measure: Callable[[Programs], Iterator[Json]],
) -> None:
    """Add rows of tasks, paired with program keys, that have none yet. The key is `schema`'s first
    column. `measure` gives rows of the programs no snapshot of the root knows."""
    key = schema.names[0]
    snapshot.recover(schema)
    done = snapshot.keys(TASK)
    left = grouped((name, task) for name, task in wanted if task.task_id not in done)

    def rows() -> Iterator[Json]:
        yield from snapshot.read(unique=key).to_dicts()
        yield from known_rows(snapshot, key, list(left), schema)
        yield from measure({name: tasks[0] for name, tasks in left.items()})

    problems = 0
    with snapshot.journal(schema) as add:
        for row in rows():
            for task in left.pop(row[key], ()):
                add(row | {TASK: task.task_id})
                problems += row["problem"] is not None
            now = len(wanted) - sum(map(len, left.values()))
            note = f"{problems} could not be run" if problems else ""
            report(snapshot.stage, now, len(wanted), note)
