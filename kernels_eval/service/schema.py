"""What the service is asked and what it answers. A request names one task and one candidate; an
evaluation has a verdict exactly where it is done, an error where the machine failed."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, StringConstraints, model_validator

from kernels_eval.exchange.flashinfer import (
    Code,
    Definition,
    Finite,
    Name,
    Solution,
    Workload,
)
from kernels_eval.records import KernelTask, Language, Verdict, stable_hash

Json = dict[str, object]
"""An object as JSON has it."""
MOST_REQUESTS = 1024
"""Requests of one batch."""
Identifier = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}$")]


class TaskSource(Finite):
    """A task by its program, in the form of `KernelTask`."""

    code: Code
    entry_point: Name = "Model"
    init_form: Literal["args", "args_kwargs"] = "args"
    name: Name = "source"

    def task(self) -> KernelTask:
        identity = stable_hash([self.code, self.entry_point, self.init_form])
        return KernelTask(task_id=f"source/{identity[:16]}", **self.model_dump())


class EvaluationRequest(Finite):
    """One candidate for one task: exactly one of `task_id`, `task` and `definition`, and exactly
    one of `code`, `response` and `solution`, the last for a `definition`."""

    task_id: Name | None = None
    """a task that the service was started with"""
    task: TaskSource | None = None
    definition: Definition | None = None
    workload: Workload = Field(default_factory=Workload)
    """sizes and scalars for `definition`"""
    code: Code | None = None
    """a Python module that defines ModelNew"""
    response: Annotated[str, Field(max_length=4_000_000)] | None = None
    """a model's whole answer, from which the module is parsed; it begins with the mark that opens a
    thought where the prompt ended with one"""
    finish_reason: Annotated[str, Field(max_length=64)] | None = None
    """how `response` ended: `length` where it was cut off, whose thoughts then hold no kernel"""
    solution: Solution | None = None
    """a kernel for `definition`, in the schema of FlashInfer-Bench or SOL-ExecBench"""
    language: Language | None = None
    """what the kernel is judged as; default: read from its source"""
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    """higher is earlier"""
    deadline_s: PositiveFloat | None = None
    """seconds from acceptance after which the verdict is of no use"""
    client: Annotated[str, Field(max_length=128)] = ""
    """clients of one priority take turns"""
    id: Identifier | None = None
    """names the evaluation: the same request under the same id is the same evaluation"""

    @model_validator(mode="after")
    def _one_task_and_one_candidate(self) -> EvaluationRequest:
        for names in (("task_id", "task", "definition"), ("code", "response", "solution")):
            if sum(getattr(self, name) is not None for name in names) != 1:
                raise ValueError(f"give exactly one of {', '.join(names)}")
        if self.solution and not self.definition:
            raise ValueError("a solution needs its definition")
        return self


class State(StrEnum):
    """Where an evaluation is."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    """there is a verdict"""
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    """the deadline passed before there was a verdict"""
    FAILED = "failed"
    """the machine failed, not the kernel: there is no verdict"""

    @property
    def final(self) -> bool:
        return self not in (State.QUEUED, State.RUNNING)


class Evaluation(Finite):
    """What became of a request. Times are Unix seconds."""

    id: Identifier
    state: State
    verdict: Verdict | None = None
    error: str | None = None
    """what failed of the machine"""
    note: str = ""
    """what it waits for, while no worker judges"""
    cached: bool = False
    """the verdict was there, or under way, before this request"""
    submitted_s: float
    started_s: float | None = None
    finished_s: float | None = None

    @model_validator(mode="after")
    def _legal(self) -> Evaluation:
        if (self.verdict is not None) != (self.state is State.DONE):
            raise ValueError("an evaluation has a verdict exactly where it is done")
        if (self.error is not None) != (self.state is State.FAILED):
            raise ValueError("an evaluation has an error exactly where it has failed")
        return self


class Accepted(Finite):
    """The evaluations of a batch, in its order."""

    evaluations: list[Evaluation]
