"""Tasks in, where their references spend their time out: one row a task, each program profiled once
for a device.

Guarantees: a task's code runs in a confined child with a deadline and a limit on memory, one at a
time, so that no other task disturbs the clock; a task that cannot be profiled has a row that says
why, and never ends the stage; a killed run resumes, and a later one pays only for
programs that are new. Does not guarantee quiet: other programs on the machine blur the shares of
small operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kernels_eval.isolation.sandbox import ForkServer
from kernels_eval.records import KernelTask, stable_hash
from tasks.progress import report
from tasks.store import Snapshot, SnapshotRef, fingerprint, known_rows
from tasks.versions import PROFILE_VERSION
from tasks.workload.config import ProfilingConfig
from tasks.workload.measure import ReferenceProcess, record_of, tasks_of
from tasks.workload.record import PROFILES, Profile

STAGE = "profiles"


class Profiler(ReferenceProcess):
    """Profiles one task at a time on one device ("cpu", "cuda:0")."""

    role = "profile"

    def __init__(self, device: str, config: ProfilingConfig | None = None) -> None:
        self.device, self.config = device, config or ProfilingConfig()
        super().__init__(self.config)

    def start_server(self) -> ForkServer:
        return ForkServer(threads=self.config.threads, readable=())

    def profile(self, task: KernelTask) -> Profile:
        """One task. Whatever it does, it costs a `problem`; raises SandboxError as `ask` does."""
        threads, budget_s = self.config.threads, self.config.budget_s
        answer = self.ask("profile", task, device=self.device, threads=threads, budget_s=budget_s)
        return record_of(Profile, task, answer)


def planned(tasks: SnapshotRef, config: ProfilingConfig, device: str, device_name: str) -> Snapshot:
    """The snapshot that `run` with the same arguments fills."""
    conditions = _conditions(config, device, device_name)
    key = fingerprint(STAGE, conditions, [tasks.fingerprint], PROFILE_VERSION)
    return Snapshot(tasks.root, STAGE, key)


def _conditions(config: ProfilingConfig, device: str, device_name: str) -> list[Any]:
    return [config.model_dump(mode="json"), device.split(":")[0], device_name]


def run(tasks: SnapshotRef, config: ProfilingConfig, device: str, device_name: str) -> SnapshotRef:
    """A finished snapshot of PROFILES, one row a task. `device` is where they run ("cpu",
    "cuda:0"), `device_name` what verdicts are keyed by. Raises SandboxError where no sandbox can be
    started.
    """
    snapshot = planned(tasks, config, device, device_name)
    if snapshot.finished:
        return snapshot.ref
    found = tasks_of(tasks.open().read(unique="task_id").to_dicts())
    conditions = [*_conditions(config, device, device_name), PROFILE_VERSION]
    snapshot.recover(PROFILES)
    done = snapshot.keys("task_id")
    left = {
        task.task_id: (
            task,
            stable_hash([task.code, task.entry_point, task.init_form, *conditions]),
        )
        for task in found
        if task.task_id not in done
    }
    known = {row["profile_key"]: row for row in snapshot.read(unique="profile_key").to_dicts()}
    wanted = sorted({key for _, key in left.values()} - known.keys())
    for row in known_rows(
        snapshot.root, STAGE, "profile_key", wanted, PROFILES, exclude=snapshot.fingerprint
    ):
        known[row["profile_key"]] = row
    with snapshot.journal(PROFILES) as add, Profiler(device, config) as profiler:
        for number, row in enumerate(_rows(left, known, profiler, device_name), start=1):
            add(row)
            report(STAGE, len(done) + number, len(found))
    return snapshot.publish(
        config=config, upstream=[tasks.fingerprint], rows=len(found), extra={"device": device_name}
    ).ref


def _rows(
    left: Mapping[str, tuple[KernelTask, str]],
    known: dict[str, dict[str, Any]],
    profiler: Profiler,
    device_name: str,
) -> Iterator[dict[str, Any]]:
    for task_id, (task, key) in left.items():
        if key not in known:
            made = profiler.profile(task).model_copy(update={"device": device_name})
            known[key] = made.model_dump(mode="json") | {"profile_key": key}
        yield known[key] | {"task_id": task_id}


def profiles_of(ref: SnapshotRef) -> dict[str, Profile]:
    """The profiles of a snapshot by task_id."""
    names = list(Profile.model_fields)
    rows = ref.open().read(unique="task_id", columns=names).to_dicts()
    return {row["task_id"]: Profile.model_validate(row) for row in rows}
