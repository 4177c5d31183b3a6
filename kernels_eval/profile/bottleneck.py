"""What limits a correct kernel: one finding of a closed vocabulary, its numbers, and one
suggestion. Rules fire in the order of `bottleneck.toml`, only on measured numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import StrEnum

from kernels_eval.profile.records import KernelProfile, KernelTime, OperatorTime
from kernels_eval.records import Record
from kernels_eval.tables import table_beside


class Limit(StrEnum):
    """What a kernel's time is made of."""

    MEMORY = "memory"
    """Bytes: the rest waits for the memory system."""
    COMPUTE = "compute"
    """Instructions: the arithmetic units are busy."""
    LATENCY = "latency"
    """Neither is busy: too little work is under way."""
    LAUNCH_OVERHEAD = "launch_overhead"
    """The device, or the kernel, waits for the calling program."""
    ELSEWHERE = "elsewhere"
    """The kernel is not where the time goes."""


class Cause(StrEnum):
    AT_ROOFLINE = "at_roofline"
    UNCOALESCED = "uncoalesced"
    BANK_CONFLICTS = "bank_conflicts"
    SPILLS = "spills"
    DIVERGENCE = "divergence"
    TOO_FEW_BLOCKS = "too_few_blocks"
    LOW_OCCUPANCY = "low_occupancy"


class Finding(Record):
    """`where` names the kernel or the operator. `numbers` are shares in [0, 1], and
    `blocks_per_sm`.
    """

    limit: Limit
    cause: Cause | None = None
    where: str = ""
    numbers: dict[str, float] = {}
    suggestion: str = ""

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} {value:.2g}" for name, value in self.numbers.items())
        why = f" ({self.cause})" if self.cause else ""
        return f"{self.limit}{why} in {self.where or 'the module'}: {numbers}. {self.suggestion}"


class Rule(Record):
    """Fires where each of these numbers lies in [low, high)."""

    limit: Limit
    cause: Cause | None = None
    between: dict[str, tuple[float, float]]
    suggestion: str

    def fires(self, numbers: dict[str, float]) -> bool:
        asked = self.between.items()
        return all(low <= numbers.get(name, -1) < high for name, (low, high) in asked)


_TABLE = table_beside(__file__)
RULES = tuple(map(Rule.model_validate, _TABLE["rule"]))
SHOWN = ("sm_share", "memory_share", "occupancy", "memory_speed_of_light", "compute_speed_of_light")


def findings(profile: KernelProfile) -> Iterator[Finding]:
    """All findings, the most decisive first. Raises ValueError for a candidate that could not be
    profiled.
    """
    if profile.problem is not None:
        raise ValueError(f"{profile.candidate_id} has no profile: {profile.problem}")
    numbers = numbers_of(profile)
    for rule in filter(lambda rule: rule.fires(numbers), RULES):
        spent = profile.operators if rule.limit is Limit.ELSEWHERE else profile.kernels
        named = rule.between or SHOWN
        yield Finding(
            **rule.model_dump(include={"limit", "cause", "suggestion"}),
            where=max(spent, key=_us).name if spent else "",
            numbers={name: numbers[name] for name in named if name in numbers},
        )


def _us(spent: KernelTime | OperatorTime) -> float:
    return spent.us


def numbers_of(profile: KernelProfile) -> dict[str, float]:
    """The measured inputs of the rules, of the slowest kernel: shares in [0, 1], and
    `blocks_per_sm`.
    """
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
    found = kernel.model_dump(include={"blocks_per_sm", "occupancy", "local_share"})
    metrics = {name: value for name, value in kernel.metrics.items() if math.isfinite(value)}
    for name, (metric, whole) in _TABLE["shares"].items():
        if metric in metrics:
            found[name] = metrics[metric] / whole
    for name, (parts, whole) in _TABLE["ratios"].items():
        if metrics.get(whole):
            found[name] = sum(metrics.get(part, 0.0) for part in parts) / metrics[whole]
    for name, parts in _TABLE["least"].items():
        found[name] = min((metrics[p] / 100 for p in parts if metrics.get(p)), default=None)
    if "sm_share" in found:  # where the memory's is not known, nothing says that it leads
        found["compute_lead"] = found["sm_share"] - found.get("memory_share", 0.0)
    return found
