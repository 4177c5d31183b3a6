"""Questions about one task, each answered by a process of its own."""

from __future__ import annotations

from typing import Any, Generic

from pydantic import StrictBool, StrictFloat, StrictInt, StrictStr

from kernels_eval.protocol.message import A, Payload, Request


class AboutTask(Request[A], Generic[A]):
    """A question about a task, whose file is at `path`."""

    path: str
    entry_point: str
    init_form: str


class ArgumentForm(Payload):
    """A tensor by shape, strides in elements and dtype; else the value (strict: True is no 1)."""

    name: str
    shape: list[int] | None = None
    stride: list[int] | None = None
    dtype: str | None = None
    value: StrictBool | StrictInt | StrictFloat | StrictStr | None = None


class Interface(Payload):
    """What goes in and out of one forward call. `state`: parameters, then buffers; `structure`: the
    outputs' nesting as `flatten_outputs` writes it.
    """

    inputs: list[ArgumentForm]
    state: list[ArgumentForm]
    outputs: list[ArgumentForm]
    structure: str
    mutates: bool


class DescribeInterface(AboutTask[Interface]):
    """What goes in and out of one forward call?"""


class GraphReport(Payload):
    """Digests of the ATen graph of one forward call (`kernels_eval.reference.graph.Graph`)."""

    normalised: str
    shapes: str
    structure: str
    operators: list[str]


class WorkloadReport(Payload):
    """Operators, floating-point operations and least bytes of one forward call; `executed` says on
    what.
    """

    operators: list[str]
    flops: int
    bytes_min: int
    executed: str
    graph: GraphReport | None


class MeasureWorkload(AboutTask[WorkloadReport]):
    """How much does a task's reference compute and move? Larger declared inputs are not made."""

    declared_max_bytes: int


class OperatorTimes(Payload):
    """Microseconds per call of every outermost operator and own kernel, slowest first, and by which
    clock.
    """

    operators: list[dict[str, Any]]
    kernels: list[dict[str, Any]] = []
    total_us: float
    clock: str


class TimeOperators(AboutTask[OperatorTimes]):
    device: str
    threads: int
    budget_s: float
