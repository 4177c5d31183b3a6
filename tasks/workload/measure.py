"""Workloads of tasks, counted in confined processes, without storage where possible. A task can
lie: it runs in the process that counts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, Self, TypeVar

from pydantic import ValidationError

from kernels_eval.config import LimitsConfig
from kernels_eval.errors import KilledError, SandboxError
from kernels_eval.protocol import AboutTask, MeasureWorkload, TimeOperators
from kernels_eval.records import Json, KernelTask, Reason, Record, Row
from kernels_eval.sandbox.child import Child, ChildFailure
from kernels_eval.sandbox.server_handle import ForkServer
from tasks.workload.record import Profile, Workload

SERVER_TRIES = 3
PROBLEM_CHARS = 500
MAX_JOBS = 8
TASKS_A_JOB = 50
"""Another process takes as long to start as the first one takes for so many tasks."""
TIMEOUT_S = 60.0
"""Deadline of one task."""
COUNTING_GB, PROFILING_GB = 4.0, 16.0
"""Resident memory of one task's process."""
DECLARED_MAX_BYTES = 1 << 30
"""Declared inputs up to this many bytes are made for a task that does not run without storage."""
PROFILING_BUDGET_S = 0.3
"""Time of the calls that are profiled; one call at least, 20 at most."""

Answer = TypeVar("Answer", bound=Record)


class ReferenceProcess:
    """Asks a confined child about tasks, reusing a process with torch imported. A context manager.

    Raises SandboxError where no fork server can be started.
    """

    role: str

    def __init__(self, timeout_s: float, memory_gb: float, start: Callable[[], ForkServer]) -> None:
        self._timeout_s, self._start = timeout_s, start
        # fewer seconds of processor time than the deadline would hide the deadline
        self._limits = LimitsConfig(memory_gb=memory_gb, cpu_s=int(timeout_s) + 60)
        self._server: ForkServer | None = None
        self._closed = False

    def ask(self, question: type[AboutTask[Any]], task: KernelTask, **arguments: Any) -> Json:
        """A fresh child's answer; a task that breaks it gives "error" and "detail". Raises
        SandboxError where the sandbox fails repeatedly."""
        for _ in range(SERVER_TRIES - 1):
            try:
                return self._ask(question, task, arguments)
            except SandboxError:
                if self._closed:
                    raise
        return self._ask(question, task, arguments)

    def _ask(self, question: type[AboutTask[Any]], task: KernelTask, arguments: Row) -> Json:
        if self._server is None or not self._server.alive:
            self._server = self._start()
        if self._closed:  # while it was started: `close` could not close the server
            self._server.close()
            raise SandboxError("the measurement process ended")
        with Child(self._server, self.role, self._limits) as child:
            request = question(
                path=str(child.write_file("task.py", task.code)),
                entry_point=task.entry_point,
                init_form=task.init_form,
                **arguments,
            )
            try:
                return child.request(request, self._timeout_s)
            except ChildFailure as failure:
                return {"error": failure.reason, "detail": failure.detail}
            except KilledError as error:
                return {"error": Reason.CRASHED, "detail": str(error)}

    def close(self) -> None:
        self._closed = True
        if self._server is not None:
            self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def record_of(kind: type[Answer], task: KernelTask, answer: Row) -> Answer:
    """The answer as a record with `task_id` and `problem`, which holds errors and unreadable
    answers."""
    problem = f"{answer.get('error')}: {answer.get('detail')}"
    if "error" not in answer:
        try:
            return kind.model_validate({"task_id": task.task_id, **answer})
        except (ValidationError, TypeError) as error:
            problem = f"its process answered with no {kind.__name__.lower()}: {error}"
    short = " ".join(problem.split())[:PROBLEM_CHARS]
    return kind.model_validate({"task_id": task.task_id, "problem": short})


class Measurer(ReferenceProcess):
    """Counts workloads, one task at a time."""

    role = "workload"

    def __init__(self, timeout_s: float = TIMEOUT_S, memory_gb: float = COUNTING_GB) -> None:
        super().__init__(timeout_s, memory_gb, partial(ForkServer, readable=(), warm="workload"))

    def measure(self, task: KernelTask) -> Workload:
        """Count one task; its failures are a `problem`. Raises SandboxError as `ask` does."""
        answer = self.ask(MeasureWorkload, task, declared_max_bytes=DECLARED_MAX_BYTES)
        found = record_of(Workload, task, answer)
        complete = None not in (found.flops, found.bytes_min, found.executed)
        if complete == (found.problem is not None):
            problem = "its process answered with half a workload"
            found = Workload(task_id=task.task_id, problem=problem)
        return found


class Profiler(ReferenceProcess):
    """Profiles tasks one by one on a device ("cpu", "cuda:0"), with verification's CPU threads."""

    role = "profile"

    def __init__(self, device: str, threads: int = 1, timeout_s: float = TIMEOUT_S) -> None:
        self.device, self.threads = device, threads
        start = partial(ForkServer, threads=threads, readable=())
        super().__init__(timeout_s, PROFILING_GB, start)

    def profile(self, task: KernelTask) -> Profile:
        """Profile one task; its failures are a `problem`. Raises SandboxError as `ask` does."""
        how = {"device": self.device, "threads": self.threads, "budget_s": PROFILING_BUDGET_S}
        answer = self.ask(TimeOperators, task, **how)
        answer.pop("kernels", None)  # a reference has none of its own
        return record_of(Profile, task, answer)


_kept: list[Measurer] | None = None
"""In a block of `counting`: the processes that its sets of tasks share."""


def measured(
    tasks: Iterable[KernelTask], jobs: int | None = None
) -> Iterator[tuple[KernelTask, Workload]]:
    """Tasks with their workloads as they are done, `jobs` at a time (default: as many as pay off
    here). Raises SandboxError as `Measurer.measure` does."""
    wanted = list(tasks)
    worthwhile = 1 + len(wanted) // TASKS_A_JOB
    jobs = jobs or min(MAX_JOBS, len(os.sched_getaffinity(0)), worthwhile)
    own: list[Measurer] = []
    started = own if _kept is None else _kept
    started += [Measurer() for _ in range(jobs - len(started))]
    idle: SimpleQueue[Measurer] = SimpleQueue()
    for measurer in started[:jobs]:
        idle.put(measurer)

    def one(task: KernelTask) -> tuple[KernelTask, Workload]:
        measurer = idle.get()
        try:
            return task, measurer.measure(task)
        finally:
            idle.put(measurer)

    pool, done = ThreadPoolExecutor(jobs), False
    try:
        for future in as_completed([pool.submit(one, task) for task in wanted]):
            yield future.result()
        done = True
    finally:
        # before the pool: a run that is stopped does not wait for the deadline of a child
        ended = own if done else started
        while ended:
            ended.pop().close()
        pool.shutdown(cancel_futures=True)


@contextmanager
def counting() -> Iterator[None]:
    """Count several sets of tasks in the block by the same processes: one takes as long to start
    as for some fifty tasks."""
    global _kept
    started: list[Measurer] = []
    _kept = started
    try:
        yield
    finally:
        _kept = None
        for measurer in started:
            measurer.close()
