"""What the service is asked and what it answers.

Guarantees: frozen, without unknown fields, NaN or infinities; a request names exactly one task and
one candidate; an evaluation has a verdict exactly where it is done, and says what failed exactly
where the machine did. Does not guarantee that a task's program runs: the verdict `task_error` says
that.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import (
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    model_validator,
)

from kernels_eval.records import KernelTask, Language, Record, Verdict, stable_hash

MOST_REQUESTS = 1024
"""Requests of one batch."""
Identifier = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}$")]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Code = Annotated[str, Field(min_length=1, max_length=1_000_000)]


class _Finite(Record):
    model_config = ConfigDict(allow_inf_nan=False)


class TaskSource(_Finite):
    """A task by its program, in the form of `KernelTask`."""

    code: Code
    entry_point: Name = "Model"
    init_form: Literal["args", "args_kwargs"] = "args"
    name: Name = "source"

    def task(self) -> KernelTask:
        identity = stable_hash([self.code, self.entry_point, self.init_form])
        return KernelTask(task_id=f"source/{identity[:16]}", **self.model_dump())


class Axis(_Finite):
    """A dimension: fixed, or given by the workload."""

    type: Literal["const", "var"]
    value: PositiveInt | None = None
    description: str | None = None


class TensorSpec(_Finite):
    """A tensor by the names of its axes; a scalar where `shape` is None."""

    shape: tuple[Name, ...] | None
    dtype: Name
    description: str | None = None


class WorkloadInput(_Finite):
    """How one input is made: drawn at random, or a scalar's value."""

    type: Literal["random", "scalar"]
    value: bool | int | float | None = None


class Workload(_Finite):
    """Values of the variable axes, and of scalar inputs."""

    axes: dict[Name, PositiveInt] = {}
    inputs: dict[Name, WorkloadInput] = {}
    uuid: str | None = None


FLOATS = ("float32", "float16", "bfloat16")


class Definition(_Finite):
    """A task in the schema of FlashInfer Trace (flashinfer-bench, `data/definition.py`).

    `reference` defines `run`, which takes the inputs in their order and returns the outputs.

    Inputs that are drawn are standard normal, of a floating type: integers are indices or lengths,
    for which no random value is known to be valid.
    """

    name: Name
    op_type: Name
    axes: dict[Name, Axis]
    inputs: dict[Name, TensorSpec]
    outputs: dict[Name, TensorSpec]
    reference: Code
    tags: tuple[str, ...] | None = None
    description: str | None = None
    constraints: tuple[str, ...] | None = None

    def task(self, workload: Workload) -> KernelTask:
        """The task of this definition for one workload. Raises ValueError where an axis or a scalar
        has no value, or an input cannot be drawn."""
        sizes = {name: axis.value for name, axis in self.axes.items() if axis.value}
        sizes |= workload.axes
        made = [
            _drawn(name, spec, sizes, workload.inputs.get(name))
            for name, spec in self.inputs.items()
        ]
        code = _PROGRAM.format(reference=self.reference, inputs=", ".join(made))
        return KernelTask(
            task_id=f"definition/{self.name}/{stable_hash(code)[:16]}", name=self.name, code=code
        )


_PROGRAM = """{reference}

import torch


class Model(torch.nn.Module):
    def forward(self, *inputs):
        return run(*inputs)


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return []
"""


def _drawn(name: str, spec: TensorSpec, sizes: dict[str, int], given: WorkloadInput | None) -> str:
    """The expression that makes one input."""
    if given and given.type == "scalar":
        return repr(given.value)
    if spec.shape is None:
        raise ValueError(f"scalar input {name!r} has no value: give it in workload.inputs")
    if missing := [axis for axis in spec.shape if axis not in sizes]:
        raise ValueError(f"axis {missing[0]!r} has no value: give it in workload.axes")
    if spec.dtype not in FLOATS:
        raise ValueError(
            f"input {name!r} is {spec.dtype[:20]!r}, and only {', '.join(FLOATS)} can be drawn:"
            " give the task by its source"
        )
    shape = tuple(sizes[axis] for axis in spec.shape)
    return f"torch.randn({shape}, dtype=torch.{spec.dtype})"


class EvaluationRequest(_Finite):
    """One candidate for one task: exactly one of `task_id`, `task` and `definition`, and exactly
    one of `code` and `response`."""

    task_id: Name | None = None
    """a task that the service was started with"""
    task: TaskSource | None = None
    definition: Definition | None = None
    workload: Workload = Field(default_factory=Workload)
    """sizes and scalars for `definition`"""
    code: Code | None = None
    """a Python module that defines ModelNew"""
    response: Annotated[str, Field(max_length=4_000_000)] | None = None
    """a model's whole answer, from which the module is parsed"""
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
        for names in (("task_id", "task", "definition"), ("code", "response")):
            if sum(getattr(self, name) is not None for name in names) != 1:
                raise ValueError(f"give exactly one of {', '.join(names)}")
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


class Evaluation(_Finite):
    """What became of a request. Times are Unix seconds."""

    id: Identifier
    state: State
    verdict: Verdict | None = None
    error: str | None = None
    """what failed of the machine"""
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
