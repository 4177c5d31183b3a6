"""The record of where one task's reference spends its time, and its columns."""

from __future__ import annotations

from typing import Literal

import pyarrow as pa
from pydantic import Field

from kernels_eval.records import Record

PROFILES = pa.schema(
    [
        (
            "profile_key",
            pa.string(),
        ),  # hash(program, limits, device, code): tasks with the same program share a row
        ("task_id", pa.string()),
        (
            "operators",
            pa.list_(
                pa.struct([("name", pa.string()), ("us", pa.float64()), ("calls", pa.int64())])
            ),
        ),
        ("total_us", pa.float64()),
        ("clock", pa.string()),
        ("device", pa.string()),
        ("problem", pa.string()),
    ]
)


class OperatorTime(Record):
    """One outermost aten operator: microseconds of one forward call that are spent in it, and how
    often it is called there."""

    name: str = Field(min_length=1, max_length=200)
    us: float = Field(ge=0, allow_inf_nan=False)
    calls: int = Field(ge=0)


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
        return (
            {each.name: each.us / self.total_us for each in self.operators} if self.total_us else {}
        )
