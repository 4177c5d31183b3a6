"""The record of one kernel's profile."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from kernels_eval.profile.roofline import sol_score
from kernels_eval.records import Record

Share = Field(default=None, ge=0, allow_inf_nan=False)


class OperatorTime(Record):
    """One outermost aten operator: microseconds of one forward call that are spent in it, and how
    often it is called there."""

    name: str = Field(min_length=1, max_length=200)
    us: float = Field(ge=0, allow_inf_nan=False)
    calls: int = Field(ge=0)


class KernelTime(Record):
    """One of the candidate's own kernels: its time in one forward call, and, on a GPU, what its
    longest launch takes of the device. What was not seen is None."""

    name: str = Field(max_length=4000)
    us: NonNegativeFloat
    calls: NonNegativeInt
    grid: tuple[NonNegativeInt, ...] | None = None
    """blocks"""
    block: tuple[NonNegativeInt, ...] | None = None
    """threads"""
    registers: NonNegativeInt | None = None
    """a thread"""
    shared_bytes: NonNegativeInt | None = None
    """a block"""
    stack_bytes: NonNegativeInt | None = None
    """a thread"""
    blocks_per_sm: float | None = Share
    """blocks of the grid for each multiprocessor"""
    occupancy: float | None = Share
    """resident warps, of those that a multiprocessor holds; from the counters where they are
    there"""
    local_share: float | None = Share
    """instructions that access local memory, of all in its code"""
    metrics: dict[str, float] = {}
    """ncu's, by the names of `kernels_eval.profile.ncu`"""


class KernelProfile(Record):
    """Where the time of a correct candidate goes, against what its task needs at least.

    `operators` are the candidate's calls of PyTorch, `kernels` its own, `reference_operators` those
    of the reference; microseconds of one forward call. Latencies are the verdict's, `flops` and
    `bytes_min` the reference's. Peaks are of the device's data sheet, or measured on a CPU.
    `counters` says why there are no metrics, `problem` why there is no profile.
    """

    candidate_id: str
    task_id: str
    device: str
    reference_ms: float | None = Share
    candidate_ms: float | None = Share
    flops: NonNegativeInt | None = None
    bytes_min: NonNegativeInt | None = None
    peak_flops: float | None = Share
    peak_bytes_per_s: float | None = Share
    operators: tuple[OperatorTime, ...] = ()
    kernels: tuple[KernelTime, ...] = ()
    reference_operators: tuple[OperatorTime, ...] = ()
    total_us: float | None = Share
    clock: Literal["device", "cpu"] | None = None
    counters: str = ""
    problem: str | None = None

    @property
    def memory_ms(self) -> float | None:
        """Milliseconds that the task's bytes need at least."""
        return _ms(self.bytes_min, self.peak_bytes_per_s)

    @property
    def compute_ms(self) -> float | None:
        """Milliseconds that the task's operations need at least."""
        return _ms(self.flops, self.peak_flops)

    @property
    def least_ms(self) -> float | None:
        """The speed of light: the larger of both bounds (roofline model,
        `tasks.workload.record.least_ms`).
        """
        return max(filter(None, (self.memory_ms, self.compute_ms)), default=None)

    @property
    def speed_of_light(self) -> float | None:
        """Share of the speed of light that the candidate reaches. Above 1 the bound does not hold:
        fewer operations, or nearer memory.
        """
        least = self.least_ms
        return least / self.candidate_ms if least and self.candidate_ms else None

    @property
    def sol_score(self) -> float | None:
        """SOL-ExecBench's score (`kernels_eval.profile.roofline.sol_score`)."""
        times = self.candidate_ms, self.reference_ms, self.least_ms
        return sol_score(*known) if len(known := [each for each in times if each]) == 3 else None

    @property
    def kernel_share(self) -> float | None:
        spent = sum(kernel.us for kernel in self.kernels)
        return spent / self.total_us if self.total_us else None

    @property
    def rewrote_bottleneck(self) -> bool | None:
        """Whether the candidate no longer calls the reference's slowest operator."""
        if not self.reference_operators or not self.total_us:
            return None
        slowest = max(self.reference_operators, key=lambda each: each.us).name
        return slowest not in {each.name for each in self.operators}


def _ms(amount: int | None, per_s: float | None) -> float | None:
    return 1e3 * amount / per_s if amount is not None and per_s else None
