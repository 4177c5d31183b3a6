"""Records of workloads and profiles."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kernels_eval.profile.records import OperatorTime
from kernels_eval.records import Json, Record
from tasks.operators import OperatorKind, operator_kind
from tasks.workload.families import families_of

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class Graph(Record):
    """Digests of a forward call's ATen graph (`kernels_eval.reference.graph.Graph`)."""

    normalised: Digest
    """operators, shapes and numbers"""
    shapes: Digest
    """the same without sizes"""
    structure: Digest
    """operators and what flows between them"""
    operators: tuple[str, ...] = Field(max_length=512)
    """those that compute and reach an output, in order"""


class Workload(Record):
    """What a forward call of a task's reference computes and moves at the declared shapes.

    `operators` are the first 256 outermost torch calls. `flops` are those of matrix products,
    convolutions and attention by torch's formulas, 2 per multiply-add. `bytes_min` counts once what
    is read (inputs, parameters, buffers, constants), output or changed in place. A reference that
    did not run has a `problem` and no numbers, one not traced no `graph`.
    """

    task_id: str
    operators: tuple[str, ...] = Field(default=(), max_length=256)
    flops: int | None = Field(default=None, ge=0, lt=1 << 63)
    bytes_min: int | None = Field(default=None, ge=0, lt=1 << 63)
    executed: Literal["meta", "declared inputs"] | None = None
    """without storage, or on real inputs (CPU)"""
    graph: Graph | None = None
    problem: str | None = None

    @property
    def operator_kind(self) -> OperatorKind | None:
        return None if self.executed is None else operator_kind(self.operators)

    @property
    def families(self) -> tuple[str, ...]:
        return families_of(self.operators)

    def row(self) -> Json:
        derived = {"operator_kind": self.operator_kind, "families": self.families}
        return self.model_dump(mode="json") | derived


class Profile(Record):
    """Operator times of a forward call at the declared shapes, slowest first.

    `total_us` are microseconds of all operators, also beyond the first 64. `clock` is "device" for
    timed GPU kernels, "cpu" for processor self time.
    """

    task_id: str
    operators: tuple[OperatorTime, ...] = Field(default=(), max_length=64)
    total_us: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    clock: Literal["device", "cpu"] | None = None
    device: str = ""
    problem: str | None = None
