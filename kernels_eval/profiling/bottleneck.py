"""What limits a correct kernel: one finding of a closed vocabulary, the numbers that say so, and
one suggestion.

Guarantees: the same profile gives the same finding; the rules are asked in the order of `RULES`,
and one fires only where every number that it names was measured. Does not guarantee that removing
the limit makes the kernel faster: another one may be right behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from math import inf
from typing import NamedTuple

from kernels_eval.profiling.metrics import (
    ACTIVE,
    CONFLICTS,
    ELAPSED,
    GLOBAL,
    SHARED,
)
from kernels_eval.profiling.records import KernelProfile, KernelTime, OperatorTime
from kernels_eval.records import Record

WARP = 32


class Limit(StrEnum):
    """What a kernel's time is made of."""

    MEMORY = "memory"
    """Bytes: the memory system is what the others wait for."""
    COMPUTE = "compute"
    """Instructions: the multiprocessors, or the processor's units, are busy."""
    LATENCY = "latency"
    """Neither is busy: too little work is under way at a time."""
    LAUNCH_OVERHEAD = "launch_overhead"
    """The device, or the kernel, waits for the program that calls it."""
    ELSEWHERE = "elsewhere"
    """The kernel is not where the time goes."""


class Cause(StrEnum):
    """Why, where the profile tells."""

    AT_ROOFLINE = "at_roofline"
    UNCOALESCED = "uncoalesced"
    BANK_CONFLICTS = "bank_conflicts"
    SPILLS = "spills"
    DIVERGENCE = "divergence"
    TOO_FEW_BLOCKS = "too_few_blocks"
    LOW_OCCUPANCY = "low_occupancy"


class Finding(Record):
    """`where` names the kernel or the operator. `numbers` are shares in [0, 1], and
    `blocks_per_sm`."""

    limit: Limit
    cause: Cause | None = None
    where: str = ""
    numbers: dict[str, float] = {}
    suggestion: str = ""

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} {value:.2g}" for name, value in self.numbers.items())
        why = f" ({self.cause})" if self.cause else ""
        return f"{self.limit}{why} in {self.where or 'the module'}: {numbers}. {self.suggestion}"


class Rule(NamedTuple):
    """Fires where each of these numbers lies in [low, high)."""

    limit: Limit
    cause: Cause | None
    between: Mapping[str, tuple[float, float]]
    suggestion: str


HALF, MOST, SOME = (0, 0.5), (0.6, inf), (0.3, inf)
NEAR, LEADS = (0.7, inf), (0, inf)
RULES = (
    Rule(
        *(Limit.ELSEWHERE, None, {"kernel_share": HALF}),
        "Write a kernel for this operator, or fuse it with yours.",
    ),
    Rule(
        *(Limit.LAUNCH_OVERHEAD, None, {"busy_share": HALF}),
        "Do more in one launch: fuse kernels, and avoid allocations and Python work in `forward`.",
    ),
    Rule(
        *(Limit.MEMORY, Cause.AT_ROOFLINE, {"memory_speed_of_light": NEAR}),
        "It moves little more than it must: only moving fewer bytes makes it faster.",
    ),
    Rule(
        *(Limit.COMPUTE, Cause.AT_ROOFLINE, {"compute_speed_of_light": NEAR}),
        "It computes near the peak: only fewer operations make it faster.",
    ),
    Rule(
        *(Limit.LATENCY, Cause.TOO_FEW_BLOCKS, {"blocks_per_sm": (0, 1)}),
        "Divide the work into more blocks: there are fewer than multiprocessors.",
    ),
    Rule(
        *(Limit.MEMORY, Cause.SPILLS, {"local_share": (0.1, inf)}),
        "Use fewer live values in a thread, or allow more registers: values go to local memory.",
    ),
    Rule(
        *(Limit.MEMORY, Cause.BANK_CONFLICTS, {"bank_conflict_share": SOME, "shared_share": SOME}),
        "Pad or swizzle the arrays in shared memory: threads of a warp meet in one bank.",
    ),
    Rule(
        *(Limit.COMPUTE, Cause.DIVERGENCE, {"active_lanes": HALF}),
        "Let the threads of a warp take the same path: regroup the work, or use selects.",
    ),
    Rule(
        *(Limit.MEMORY, Cause.UNCOALESCED, {"used_of_sectors": HALF, "memory_share": SOME}),
        "Let neighbouring threads access neighbouring addresses, through shared memory if needed.",
    ),
    Rule(
        *(Limit.COMPUTE, None, {"sm_share": MOST, "compute_lead": LEADS}),
        "Reduce instructions: reuse values, hoist invariants, use fused or tensor instructions.",
    ),
    Rule(
        *(Limit.MEMORY, None, {"memory_share": MOST}),
        "Move fewer bytes: fuse passes, keep values in registers or shared memory, load vectors.",
    ),
    Rule(
        *(Limit.LATENCY, Cause.LOW_OCCUPANCY, {"occupancy": (0, 0.3)}),
        "Let more warps be resident: use fewer registers or less shared memory, or other blocks.",
    ),
    Rule(
        *(Limit.MEMORY, None, {"uncounted": LEADS, "memory_speed_of_light": SOME}),
        "Move fewer bytes: fuse passes, avoid temporaries, and access memory in order.",
    ),
    Rule(
        *(Limit.COMPUTE, None, {"uncounted": LEADS, "compute_speed_of_light": SOME}),
        "Reduce operations, and let vector units and all cores do them.",
    ),
    Rule(
        *(Limit.LATENCY, None, {}),
        "Give it more independent work at a time: unroll, vectorise, prefetch, shorten chains.",
    ),
)
SHOWN = ("sm_share", "memory_share", "occupancy", "memory_speed_of_light", "compute_speed_of_light")
"""What the last rule shows."""


def find_bottleneck(profile: KernelProfile) -> Finding:
    """The first finding. Raises ValueError for a candidate that could not be profiled."""
    return next(findings(profile))


def findings(profile: KernelProfile) -> Iterator[Finding]:
    """All findings, the most decisive first. Raises as `find_bottleneck` does."""
    if profile.problem is not None:
        raise ValueError(f"{profile.candidate_id} has no profile: {profile.problem}")
    numbers = numbers_of(profile)
    kernel = max(profile.kernels, key=_us).name if profile.kernels else ""
    operator = max(profile.operators, key=_us).name if profile.operators else ""
    for rule in RULES:
        if all(low <= numbers.get(name, -1) < high for name, (low, high) in rule.between.items()):
            named = [*(rule.between or SHOWN)]
            yield Finding(
                limit=rule.limit,
                cause=rule.cause,
                where=operator if rule.limit is Limit.ELSEWHERE else kernel,
                numbers={name: numbers[name] for name in named if name in numbers},
                suggestion=rule.suggestion,
            )


def _us(spent: KernelTime | OperatorTime) -> float:
    return spent.us


def numbers_of(profile: KernelProfile) -> dict[str, float]:
    """What the rules ask about, where it was measured: shares in [0, 1], and `blocks_per_sm`. Of
    the kernel that takes the most time, where there are several."""
    wall, spent = profile.candidate_ms, profile.total_us
    memory, compute = profile.memory_ms, profile.compute_ms
    found: dict[str, float | None] = {
        "kernel_share": profile.kernel_share,
        "busy_share": min(1.0, spent / wall / 1e3) if spent and wall else None,
        "memory_speed_of_light": memory / wall if memory and wall else None,
        "compute_speed_of_light": compute / wall if compute and wall else None,
    }
    if profile.kernels:
        found |= _of_kernel(max(profile.kernels, key=_us))
    if found.get("sm_share") is None:
        bounds = (found["memory_speed_of_light"] or 0.0, found["compute_speed_of_light"] or 0.0)
        found["uncounted"] = max(bounds)
        # only the nearer of both bounds can be what it waits for
        found["memory_speed_of_light" if bounds[0] < bounds[1] else "compute_speed_of_light"] = None
    return {name: value for name, value in found.items() if value is not None}


def _of_kernel(kernel: KernelTime) -> dict[str, float | None]:
    metrics = kernel.metrics

    def share(name: str, whole: float = 100.0) -> float | None:
        return metrics[name] / whole if name in metrics else None

    def ratio(part: float | None, whole: float | None) -> float | None:
        return part / whole if part is not None and whole else None

    local = [share(f"smsp__inst_executed_op_local_{each}.sum", 1.0) for each in ("ld", "st")]
    executed = metrics.get("smsp__inst_executed.sum")
    counted = ratio(sum(each or 0.0 for each in local), executed)
    sectors = [share(f"{GLOBAL}{each}.pct") for each in ("ld", "st")]
    occupancy, sm = share(f"sm__warps_active{ACTIVE}"), share(f"sm__throughput{ELAPSED}")
    memory = share(f"gpu__compute_memory_throughput{ELAPSED}")
    conflicts = metrics.get(f"{CONFLICTS}_lsu_mem_shared.sum")
    return {
        "blocks_per_sm": kernel.blocks_per_sm,
        "occupancy": kernel.occupancy if occupancy is None else occupancy,
        "local_share": kernel.local_share if counted is None else counted,
        "bank_conflict_share": ratio(conflicts, metrics.get(f"{SHARED}.sum")),
        "shared_share": share(f"{SHARED}{ELAPSED}"),
        "active_lanes": share("smsp__thread_inst_executed_per_inst_executed.ratio", WARP),
        # 0: it loads, or stores, nothing
        "used_of_sectors": min((each for each in sectors if each), default=None),
        "sm_share": sm,
        "memory_share": memory,
        "compute_lead": None if sm is None or memory is None else sm - memory,
    }
