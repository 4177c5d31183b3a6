"""Tasks in, where their references spend their time out: one row a task, each program profiled once
for a device.

Guarantees: a task's code runs in a confined child with a deadline and a limit on memory, one at a
time, so that nothing of ours disturbs the clock; a task that cannot be profiled has a row that says
why, and never ends the stage; a killed run goes on where it was, and a later one pays only for
programs that are new. Does not guarantee quiet: other programs on the machine blur the shares of
small operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import ValidationError

from kernels_eval.config import LimitsConfig
from kernels_eval.errors import KilledError, SandboxError
from kernels_eval.isolation.sandbox import Child, ChildFailure, ForkServer
from kernels_eval.records import KernelTask, stable_hash
from tasks.progress import report
from tasks.store import Snapshot, SnapshotRef, fingerprint, known_rows
from tasks.versions import PROFILE_VERSION
from tasks.workload.operator_times_config import ProfilingConfig
from tasks.workload.operator_times_record import PROFILES, Profile

STAGE = "profiles"
ROLE = "profile"
SERVER_TRIES = 3


class Profiler:
    """Profiles one task at a time on one device ("cpu", "cuda:0"); keeps the process that has
    imported torch. Use as a context manager.

    Raises SandboxError where no fork server can be started.
    """

    def __init__(self, device: str, config: ProfilingConfig | None = None) -> None:
        self.device, self.config = device, config or ProfilingConfig()
        self._limits = LimitsConfig(
            memory_gb=self.config.memory_gb, cpu_s=int(self.config.timeout_s) + 60
        )
        self._server: ForkServer | None = None

    def profile(self, task: KernelTask) -> Profile:
        """One task. Whatever it does, it costs a `problem`; raises SandboxError only where the
        sandbox itself fails again and again."""
        for attempt in range(SERVER_TRIES):
            try:
                return self._profiled(task)
            except SandboxError:
                if attempt == SERVER_TRIES - 1:
                    raise
        raise AssertionError("not reached")

    def _profiled(self, task: KernelTask) -> Profile:
        config = self.config
        if self._server is None or not self._server.alive:
            self._server = ForkServer(threads=config.threads, readable=())
        with Child(self._server, ROLE, self._limits) as child:
            child.blamed_roles = frozenset({ROLE})
            path = child.scratch / "task.py"
            path.write_text(task.code, encoding="utf-8", errors="replace")
            try:
                answer = child.request(
                    "profile",
                    timeout=config.timeout_s,
                    path=str(path),
                    entry_point=task.entry_point,
                    init_form=task.init_form,
                    device=self.device,
                    threads=config.threads,
                    budget_s=config.budget_s,
                )
            except ChildFailure as failure:
                answer = {"error": failure.reason, "detail": failure.detail}
            except KilledError as error:
                answer = {"error": "crashed", "detail": str(error)}
        if "error" in answer:
            return Profile(
                task_id=task.task_id,
                problem=" ".join(f"{answer['error']}: {answer.get('detail')}".split())[:500],
            )
        try:
            return Profile.model_validate({"task_id": task.task_id} | answer)
        except (ValidationError, TypeError) as error:
            return Profile(
                task_id=task.task_id, problem=f"its process answered with no profile: {error}"[:500]
            )

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def planned(tasks: SnapshotRef, config: ProfilingConfig, device: str, device_name: str) -> Snapshot:
    """The snapshot that `run` with the same arguments fills."""
    key = [config.model_dump(mode="json"), device.split(":")[0], device_name]
    return Snapshot(
        tasks.root, STAGE, fingerprint(STAGE, key, [tasks.fingerprint], PROFILE_VERSION)
    )


def run(tasks: SnapshotRef, config: ProfilingConfig, device: str, device_name: str) -> SnapshotRef:
    """A finished snapshot of PROFILES, one row a task. `device` is where they run ("cpu",
    "cuda:0"), `device_name` what verdicts are keyed by. Raises SandboxError where no sandbox can be
    started.
    """
    snapshot = planned(tasks, config, device, device_name)
    if snapshot.finished:
        return snapshot.ref
    rows = tasks.open().read(unique="task_id").to_dicts()
    found = [
        KernelTask.model_validate(
            {name: row[name] for name in KernelTask.model_fields if name in row}
        )
        for row in rows
    ]
    conditions = [
        config.model_dump(mode="json"),
        device.split(":")[0],
        device_name,
        PROFILE_VERSION,
    ]
    keys = {
        task.task_id: stable_hash([task.code, task.entry_point, task.init_form, *conditions])
        for task in found
    }
    snapshot.recover(PROFILES)
    done = snapshot.keys("task_id")
    left = [task for task in found if task.task_id not in done]
    known = {row["profile_key"]: row for row in snapshot.read(unique="profile_key").to_dicts()}
    wanted = sorted({keys[task.task_id] for task in left} - known.keys())
    known |= {
        row["profile_key"]: row
        for row in known_rows(
            snapshot.root, STAGE, "profile_key", wanted, PROFILES, exclude=snapshot.fingerprint
        )
    }
    with snapshot.journal(PROFILES) as add:
        for row in _rows(left, keys, known, Profiler(device, config), device_name):
            add(row)
            report(STAGE, len(found) - len(left) + 1, len(found))
    return snapshot.publish(
        config=config, upstream=[tasks.fingerprint], rows=len(found), extra={"device": device_name}
    ).ref


def _rows(
    left: Iterable[KernelTask],
    keys: dict[str, str],
    known: dict[str, dict[str, Any]],
    profiler: Profiler,
    device_name: str,
) -> Iterator[dict[str, Any]]:
    with profiler:
        for task in left:
            key = keys[task.task_id]
            if key not in known:
                made = profiler.profile(task).model_copy(update={"device": device_name})
                known[key] = made.model_dump(mode="json") | {"profile_key": key}
            yield known[key] | {"task_id": task.task_id}


def profiles_of(ref: SnapshotRef) -> dict[str, Profile]:
    """The profiles of a snapshot by task_id."""
    rows = ref.open().read(unique="task_id").to_dicts()
    return {
        row["task_id"]: Profile.model_validate(
            {k: v for k, v in row.items() if k in Profile.model_fields}
        )
        for row in rows
    }
