"""Workloads of tasks, each counted in a confined process of its own.

Guarantees: the task's code runs only in a sandboxed child with a deadline, a limit on memory and no
storage where it can do without; a task that hangs, exits, crashes or takes too much is one
`problem`, and the others are counted as if it were not there. Does not guarantee that a task which
means to lie about itself tells the truth: it runs in the process that counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from queue import SimpleQueue
from typing import Any

from pydantic import ValidationError

from kernels_eval.config import LimitsConfig
from kernels_eval.errors import KilledError, SandboxError
from kernels_eval.isolation.sandbox import Child, ChildFailure, ForkServer
from kernels_eval.records import KernelTask
from tasks.workload.config import WorkloadConfig
from tasks.workload.record import Workload

SERVER_TRIES = 3
PROBLEM_CHARS = 500


@dataclass(frozen=True)
class Measured:
    """A workload, and what it took to count: wall seconds, and the peak resident bytes of the
    process (torch's own included)."""

    workload: Workload
    seconds: float
    peak_rss_bytes: int | None = None


class Measurer:
    """Counts one task at a time; keeps the process that has imported torch. Use as a context
    manager.

    Raises SandboxError where no fork server can be started.
    """

    def __init__(self, config: WorkloadConfig | None = None) -> None:
        self.config = config or WorkloadConfig()
        # fewer seconds of processor time than the deadline would hide the deadline
        self._limits = LimitsConfig(
            memory_gb=self.config.memory_gb, cpu_s=int(self.config.timeout_s) + 60
        )
        self._server: ForkServer | None = None
        self._closed = False

    def measure(self, task: KernelTask) -> Measured:
        """One task. Whatever it does, it costs a `problem`; raises SandboxError only where the
        sandbox itself fails again and again."""
        started = time.monotonic()
        for attempt in range(SERVER_TRIES):
            try:
                answer = self._asked(task)
                break
            except SandboxError:
                if attempt == SERVER_TRIES - 1 or self._closed:
                    raise
        peak = answer.pop("peak_rss_bytes", None)
        return Measured(
            _workload(task, answer),
            time.monotonic() - started,
            peak if isinstance(peak, int) else None,
        )

    def _asked(self, task: KernelTask) -> dict[str, Any]:
        if self._server is None or not self._server.alive:
            self._server = ForkServer(readable=(), warm="workload")
        if self._closed:  # while it was started: who closed this could not close the server
            self._server.close()
            raise SandboxError("the measurements were ended")
        with Child(self._server, "workload", self._limits) as child:
            child.blamed_roles = frozenset({"workload"})
            path = child.scratch / "task.py"
            path.write_text(task.code, encoding="utf-8", errors="replace")
            try:
                return child.request(
                    "measure",
                    timeout=self.config.timeout_s,
                    path=str(path),
                    entry_point=task.entry_point,
                    init_form=task.init_form,
                    declared_max_bytes=self.config.declared_max_bytes,
                )
            except ChildFailure as failure:
                return {"detail": failure.detail, "error": failure.reason}
            except KilledError as error:
                return {"detail": str(error), "error": "crashed"}

    def close(self) -> None:
        self._closed = True
        if self._server is not None:
            self._server.close()

    def __enter__(self) -> Measurer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def workload_of(task: KernelTask, config: WorkloadConfig | None = None) -> Workload:
    """The workload of one task. Starting the sandbox takes seconds: for many tasks use `measured`
    or `annotate`."""
    with Measurer(config) as measurer:
        return measurer.measure(task).workload


def measured(
    tasks: Iterable[KernelTask], config: WorkloadConfig | None = None
) -> Iterator[tuple[KernelTask, Measured]]:
    """Each task with its measurement, as they are done, several at a time. Raises SandboxError as
    `Measurer.measure` does."""
    config = config or WorkloadConfig()
    jobs = config.jobs or max(
        1,
        min(
            8,
            (
                len(os.sched_getaffinity(0))
                if hasattr(os, "sched_getaffinity")
                else os.cpu_count() or 1
            ),
        ),
    )
    idle: SimpleQueue[Measurer] = SimpleQueue()
    measurers = [Measurer(config) for _ in range(jobs)]
    for measurer in measurers:
        idle.put(measurer)

    def one(task: KernelTask) -> tuple[KernelTask, Measured]:
        measurer = idle.get()
        try:
            return task, measurer.measure(task)
        finally:
            idle.put(measurer)

    pool = ThreadPoolExecutor(jobs)
    try:
        todo = iter(tasks)
        running = {pool.submit(one, task) for task in islice(todo, jobs * 2)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {pool.submit(one, task) for task in islice(todo, len(done))}
            for future in done:
                yield future.result()
    except BaseException:
        for measurer in (
            measurers
        ):  # first of all: a run that is stopped does not wait for the deadline of a child
            measurer.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        for measurer in measurers:
            measurer.close()


def _workload(task: KernelTask, answer: dict[str, Any]) -> Workload:
    if "error" in answer:
        return Workload(
            task_id=task.task_id, problem=_line(f"{answer['error']}: {answer.get('detail')}")
        )
    try:
        found = Workload.model_validate({"task_id": task.task_id} | answer)
    except (ValidationError, TypeError) as error:
        return Workload(
            task_id=task.task_id, problem=_line(f"its process answered with no workload: {error}")
        )
    if found.problem is not None or None in (found.flops, found.bytes_min, found.executed):
        return Workload(task_id=task.task_id, problem="its process answered with half a workload")
    return found


def _line(text: str) -> str:
    return " ".join(text.split())[:PROBLEM_CHARS]


def tasks_of(rows: Sequence[dict[str, Any]]) -> list[KernelTask]:
    """Tasks from rows of tasks.tables.TASKS; other columns are left aside. Raises pydantic's
    ValidationError for a row that is none."""
    return [
        KernelTask.model_validate(
            {name: value for name, value in row.items() if name in KernelTask.model_fields}
        )
        for row in rows
    ]
