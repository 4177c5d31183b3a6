"""The least time that a workload can take on a machine, by the roofline model."""

from __future__ import annotations

from tasks.workload.record import Workload


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
        raise ValueError("peaks are positive numbers a second")
    return 1e3 * max(workload.bytes_min / peak_bytes_per_s, workload.flops / peak_flops)
