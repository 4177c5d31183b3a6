"""Questions about the device."""

from __future__ import annotations

from kernels_eval.protocol.message import Payload, Request


class HealthReport(Payload):
    right: bool
    free_bytes: int


class CheckHealth(Request[HealthReport]):
    """Compute something with a known answer; wait up to `patience_s` for this much free memory."""

    device: str
    wanted_bytes: int
    patience_s: float


class Peaks(Payload):
    peak_flops: float
    peak_bytes_per_s: float


class MeasurePeaks(Request[Peaks]):
    """FLOP/s of an fp32 matrix product, and bytes per second of copying a working set of this
    size.
    """

    threads: int
    working_set: int
