"""The records of one task's workload and of its profile, their columns, and the roofline bound."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kernels_eval.profile.records import OperatorTime
from kernels_eval.records import Json, Record
from tasks.operators import OperatorKind, operator_kind
from tasks.workload.families import families_of

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class Graph(Record):
    """Digests of the ATen graph of one forward call (`kernels_eval.reference.graph.Graph`)."""

    normalised: Digest
    """operators, shapes and numbers"""
    shapes: Digest
    """the same without sizes"""
    structure: Digest
    """operators and what flows between them"""
    operators: tuple[str, ...] = Field(max_length=512)
    """those that compute and reach an output, in order"""


class Workload(Record):
    """What one forward call of a task's reference computes and moves at the declared shapes.

    `operators` are the outermost torch calls in order, as in a verdict's `reference_operators` (the
    first 256). `flops` are floating-point operations of matrix products, convolutions and
    attention by torch's formulas, a multiply-add counting 2; other operators count none.
    `bytes_min` are bytes: inputs, parameters, buffers and constants that are read, outputs and
    whatever is changed in place, each once. Where the reference could not be run, `problem`
    says why and the numbers are None.
    `graph` is None where it could not be traced.
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
        """single_operator or fusion; None where the reference could not be run."""
        return None if self.executed is None else operator_kind(self.operators)

    @property
    def families(self) -> tuple[str, ...]:
        """The families of its operators, each once."""
        return families_of(self.operators)

    def row(self) -> Json:
        """A row of WORKLOADS, without its key."""
        derived = {"operator_kind": self.operator_kind, "families": self.families}
        return self.model_dump(mode="json") | derived


def least_ms(workload: Workload, peak_bytes_per_s: float, peak_flops: float) -> float:
    """Milliseconds below which one forward call cannot be on a machine that moves
    `peak_bytes_per_s` and computes `peak_flops` a second.

    The roofline model (Williams, Waterman and Patterson, "Roofline: an insightful visual
    performance model for multicore architectures", Communications of the ACM 52(4), 2009): memory
    and arithmetic overlap at best, so the slower of the two bounds. `peak_flops` must be that of
    the fastest unit a kernel may use, and `peak_bytes_per_s` that of the nearest memory that holds
    all of it between two calls. The arithmetic bound is the reference's own algorithm's: another
    one may need fewer operations (Winograd's convolution, a reference that computes what it throws
    away), so a time below it is a reason to look, no proof.

    Raises ValueError for a workload that could not be counted and for peaks that are not positive.
    """
    if workload.flops is None or workload.bytes_min is None:
        raise ValueError(f"{workload.task_id} has no counted workload: {workload.problem}")
    if not (peak_bytes_per_s > 0 and peak_flops > 0):
        raise ValueError("peaks must be positive numbers per second")
    return 1e3 * max(workload.bytes_min / peak_bytes_per_s, workload.flops / peak_flops)


class Profile(Record):
    """Where one forward call of a task's reference spends its time at the declared shapes, the
    slowest operator first.

    `total_us` are microseconds of all operators together, those beyond the first 64 included.
    `clock` is "device" where kernels on a GPU were timed and "cpu" where it is the processor's self
    time. Where the reference could not be profiled, `problem` says why.
    """

    task_id: str
    operators: tuple[OperatorTime, ...] = Field(default=(), max_length=64)
    total_us: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    clock: Literal["device", "cpu"] | None = None
    device: str = ""
    problem: str | None = None

    @property
    def shares(self) -> dict[str, float]:
        """Share of the time by operator, in [0, 1]; empty where there is none."""
        total = self.total_us
        return {each.name: each.us / total for each in self.operators} if total else {}
