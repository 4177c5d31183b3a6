"""Operator times of task references, each program profiled once per device, in a confined child,
one at a time for a quiet clock. Failures are rows with a reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kernels_eval.records import Json, KernelTask, stable_hash
from tasks.sources.stage import read_tasks
from tasks.store import Snapshot, SnapshotRef
from tasks.tables import PROFILES
from tasks.versions import PROFILE_VERSION
from tasks.workload.measure import Profiler
from tasks.workload.stage import fill

STAGE = "profiles"


def planned(tasks: SnapshotRef, threads: int, device: str, device_name: str) -> Snapshot:
    conditions = _conditions(threads, device, device_name)
    return Snapshot.planned(STAGE, conditions, [tasks], PROFILE_VERSION)


def _conditions(threads: int, device: str, device_name: str) -> list[object]:
    return [threads, device.split(":")[0], device_name]


def run(tasks: SnapshotRef, threads: int, device: str, device_name: str) -> SnapshotRef:
    """A finished snapshot of PROFILES, one row per task. `threads` are the CPU's, `device` is where
    they run ("cpu", "cuda:0"), `device_name` keys verdicts. Raises SandboxError where no sandbox
    starts."""
    snapshot = planned(tasks, threads, device, device_name)
    if snapshot.finished:
        return snapshot.ref
    found = read_tasks(tasks)
    conditions = [*_conditions(threads, device, device_name), PROFILE_VERSION]

    def profiled(programs: Mapping[str, KernelTask]) -> Iterator[Json]:
        with Profiler(device, threads) as profiler:
            for key, task in programs.items():
                row = profiler.profile(task).model_dump(mode="json")
                yield row | {"device": device_name, "profile_key": key}

    keyed = [
        (stable_hash([task.code, task.entry_point, task.init_form, *conditions]), task)
        for task in found
    ]
    fill(snapshot, PROFILES, keyed, profiled)
    extra = {"device": device_name}
    return snapshot.publish(config={"threads": threads}, rows=len(found), extra=extra).ref
