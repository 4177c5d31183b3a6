"""The first snapshot of the line: the tasks themselves, so that everything after it refers to
exactly these."""

from __future__ import annotations

from kernels_eval.errors import UsageError
from kernels_eval.records import KernelTask
from tasks.sources.config import TasksConfig
from tasks.store import Snapshot, SnapshotRef, fingerprint
from tasks.tables import TASKS

STAGE = "tasks"


def load_tasks(config: TasksConfig) -> list[KernelTask]:
    """Tasks of the configured source. Raises UsageError naming what cannot be read."""
    from tasks.sources import bundled, files, generated, kernelbench, kernelbook, tritonbench

    location, revision = config.location or "", config.revision
    if config.source in ("tritonbench", "files") and not location:
        raise UsageError(
            f"tasks.source is {config.source!r} but tasks.location is not set",
            "--set tasks.location=PATH",
        )
    match config.source:
        case "bundled":
            found = bundled.load(config.split)
        case "kernelbench":
            location = location or kernelbench.HUB_ID
            found = kernelbench.load(location, config.levels, revision, config.precision)
        case "kernelbook":
            location, revision = location or kernelbook.HUB_ID, revision or kernelbook.PINNED
            found = kernelbook.load(location, revision, limit=config.limit)
        case "tritonbench":
            found = tritonbench.load(location)
        case "files":
            found = files.load(location, config.code_column)
        case "generated":
            if config.split == "gradients":
                raise UsageError("no generated task asks for gradients", "--set tasks.split=train")
            found = generated.load(config.seed, config.count, config.split, config.sizes)
    if not found:
        raise UsageError(
            f"the task source {config.source} holds no task",
            "check tasks.location, tasks.levels and tasks.split",
        )
    return found[: config.limit]


def run(config: TasksConfig, root: str) -> SnapshotRef:
    """A finished snapshot of tasks.tables.TASKS, identified by the tasks' content: a source that
    changed is a new snapshot."""
    return keep(load_tasks(config), root, config)


def keep(found: list[KernelTask], root: str, config: object) -> SnapshotRef:
    """These tasks as a finished snapshot; `config` is what its manifest says of where they come
    from."""
    rows = [task.model_dump(mode="json") for task in found]
    snapshot = Snapshot(root, STAGE, fingerprint(STAGE, rows))
    if not snapshot.finished:
        snapshot.append(rows, TASKS, key="task_id")
        snapshot.publish(config=config, rows=len(rows))
    return snapshot.ref


def read_tasks(ref: SnapshotRef) -> list[KernelTask]:
    """The tasks of a snapshot, each once, in their order. What every later stage reads them
    with."""
    return [
        KernelTask.model_validate(row)
        for row in ref.open().read(unique="task_id").iter_rows(named=True)
    ]
