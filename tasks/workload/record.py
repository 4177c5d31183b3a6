"""The record of one task's workload, and its columns."""

from __future__ import annotations

from typing import Literal

import pyarrow as pa
from pydantic import Field, computed_field

from kernels_eval.records import Record
from tasks.operators import OperatorKind, operator_kind
from tasks.workload.families import families_of

WORKLOADS = pa.schema(
    [
        (
            "workload_key",
            pa.string(),
        ),  # hash(code, entry point, init form, limits): tasks with the same program share a row
        ("task_id", pa.string()),
        ("operators", pa.list_(pa.string())),
        ("operator_kind", pa.string()),
        ("families", pa.list_(pa.string())),
        ("flops", pa.int64()),
        ("bytes_min", pa.int64()),
        ("arithmetic_intensity", pa.float64()),
        ("uncounted", pa.list_(pa.string())),
        ("executed", pa.string()),
        ("problem", pa.string()),
    ]
)


class Workload(Record):
    """What one forward call of a task's reference computes and moves at the declared shapes.

    `operators` are the outermost torch calls in order, as in a verdict's `reference_operators` (the
    first 256). `flops` are floating-point operations, a multiply-add counting 2
    (kernels_eval.reference.operator_costs says what is exact and what estimated). `bytes_min` are
    bytes: inputs, parameters, buffers and constants that are read, outputs and whatever is changed
    in place, each once. `uncounted` names aten operators that no rule counts: with any, `flops` is
    too low. Where the reference could not be run, `problem` says why and the numbers are None.
    """

    task_id: str
    operators: tuple[str, ...] = Field(default=(), max_length=256)
    flops: int | None = Field(default=None, ge=0, lt=1 << 63)
    bytes_min: int | None = Field(default=None, ge=0, lt=1 << 63)
    uncounted: tuple[str, ...] = ()
    executed: Literal["meta", "declared inputs"] | None = Field(
        default=None, description="without storage, or on real inputs (CPU)"
    )
    problem: str | None = None

    @computed_field
    @property
    def operator_kind(self) -> OperatorKind | None:
        """single_operator or fusion; None where the reference could not be run."""
        return None if self.executed is None else operator_kind(self.operators)

    @computed_field
    @property
    def families(self) -> tuple[str, ...]:
        return families_of(self.operators)

    @computed_field
    @property
    def arithmetic_intensity(self) -> float | None:
        """FLOPs a byte; None where nothing is moved or nothing was counted."""
        return self.flops / self.bytes_min if self.flops is not None and self.bytes_min else None
