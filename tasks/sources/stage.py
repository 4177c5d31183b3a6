"""The tasks as the pipeline's first snapshot."""

from __future__ import annotations

from importlib import import_module
from types import FunctionType

from kernels_eval.errors import UsageError
from kernels_eval.extensions import load_extension
from kernels_eval.records import KernelTask
from tasks.sources.config import BUILT_IN, GROUP, TasksConfig
from tasks.store import Snapshot, SnapshotRef, fingerprint
from tasks.tables import TASKS

STAGE = "tasks"


def load_tasks(config: TasksConfig) -> list[KernelTask]:
    """Tasks of the configured source. Raises UsageError naming what cannot be read."""
    found = _load(config)
    if not found:
        raise UsageError(
            f"the task source {config.source} holds no task",
            "check tasks.location, tasks.levels and tasks.split",
        )
    return found[: config.limit]


def _load(config: TasksConfig) -> list[KernelTask]:
    if config.source in BUILT_IN:
        load = import_module(f"tasks.sources.{config.source}").from_config
    else:
        load = load_extension(GROUP, config.source, FunctionType, BUILT_IN)
    return list(load(config))


def run(config: TasksConfig, root: str) -> SnapshotRef:
    """A finished snapshot of tasks.tables.TASKS, identified by content: a changed source is a new
    one."""
    return keep(load_tasks(config), root, config)


def keep(found: list[KernelTask], root: str, config: object) -> SnapshotRef:
    rows = [task.model_dump(mode="json") for task in found]
    snapshot = Snapshot(root, STAGE, fingerprint(STAGE, rows))
    if not snapshot.finished:
        snapshot.append(rows, TASKS, key="task_id")
        snapshot.publish(config=config, rows=len(rows))
    return snapshot.ref


def read_tasks(ref: SnapshotRef) -> list[KernelTask]:
    return [
        KernelTask.model_validate(row)
        for row in ref.open().read(unique="task_id").iter_rows(named=True)
    ]
