"""How a pool has spent its time. Times are the driver's: a worker is busy from call to answer."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from kernels_eval.records import Verdict
from kernels_eval.sandbox.channel import Answer

BUILDERS, DEVICES = "builders", "devices"
RATE_AFTER_S = 600.0
"""Seconds of work before a rate per hour is said: a few minutes of one say nothing of the next."""


@dataclass
class Telemetry:
    """Sums since the pool was started."""

    builders: int = 0
    devices: int = 0
    lanes: int = 1
    """of a device, which each count as one part of it"""
    queue_depth: int = 0
    """Built candidates that wait for a device now."""
    _sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Counts by name, and seconds, whose names end in "_s"."""
    _statuses: Counter[str] = field(default_factory=Counter)
    _most: int = 0
    _began: float | None = None
    _fed: float | None = None
    _last: float = 0.0

    def tick(self, ready: int) -> None:
        """Note that `ready` candidates wait for a device from now on."""
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        self._fed = now if self._fed is None and ready else self._fed
        self._sums["depth"] += self.queue_depth * (now - self._last) if self._last else 0.0
        self._last, self.queue_depth, self._most = now, ready, max(self._most, ready)

    def worked(self, kind: str, seconds: float) -> None:
        self._sums[kind] += seconds / (self.lanes if kind == DEVICES else 1)

    def reached(self, verdict: Verdict) -> None:
        self._statuses[verdict.status.value] += 1
        self._sums["build_s"] += verdict.build_s
        if verdict.build_tier:
            for name in (verdict.build_tier, "built"):
                self._sums[name] += 1
            self._sums["cached"] += verdict.build_cached
        if verdict.run_s > 0:
            self._sums["on_device"] += 1
            self._sums["run_s"] += verdict.run_s
        for name, seconds in verdict.phases or ():
            self._sums[name] += seconds

    def summary(self) -> Answer:
        """Seconds, shares in [0, 1] and counts. `device_busy_share` starts with the first finished
        build; `built`, tiers' shares and `cache_hit_share` (None of no builds) count candidates
        that a tier was tried for.
        """
        sums, reached = self._sums, self._statuses.total()
        built = sums["built"]
        wall_s = self._seconds_since(self._began)
        fed_s = self._seconds_since(self._fed)
        return {
            "candidates": reached,
            "wall_s": round(wall_s, 3),
            "candidates_per_hour": round(3600 * reached / wall_s, 1) if wall_s else 0.0,
            "builders": self.builders,
            "devices": self.devices,
            "builder_busy_share": _share(sums[BUILDERS], self.builders * wall_s),
            "device_busy_share": _share(sums[DEVICES], self.devices * fed_s),
            "device_s_per_candidate": round(sums[DEVICES] / reached, 4) if reached else 0.0,
            "queue_depth_mean": round(sums["depth"] / wall_s, 2) if wall_s else 0.0,
            "queue_depth_most": self._most,
            "on_device": int(sums["on_device"]),
            "built": int(built),
            "cache_hit_share": _share(sums["cached"], built) if built else None,
            "lite_share": _share(sums["lite"], built) if built else None,
            "full_share": _share(sums["full"], built) if built else None,
            "seconds": {name: round(sums[name], 3) for name in sorted(sums) if name[-2:] == "_s"},
            "statuses": dict(sorted(self._statuses.items())),
        }

    def _seconds_since(self, began: float | None) -> float:
        return 0.0 if began is None else max(1e-9, self._last - began)

    def line(self) -> str:
        seen = self.summary()
        lasting = seen["wall_s"] >= RATE_AFTER_S
        rate = f"{seen['candidates_per_hour']:,.0f}/h, " if lasting else ""
        return (
            f"{rate}builders {seen['builder_busy_share']:.0%} busy, devices"
            f" {seen['device_busy_share']:.0%}, {self.queue_depth} built and waiting"
        )


def _share(part: float, whole: float) -> float:
    return round(min(1.0, part / whole), 4) if whole else 0.0
