"""How a pool of workers has spent its time, for progress lines, tracking and reports.

Guarantees: costs a few microseconds a candidate. Times are the driver's: a worker counts as busy
from the moment it is given work until its answer is there. Does not see inside a GPU: a worker that
is busy may leave its GPU idle while Python imports (see `Verdict.phases`).
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from kernels_eval.isolation.channel import Message
from kernels_eval.records import Phases, Verdict

BUILDERS, DEVICES = "builders", "devices"


@dataclass
class Telemetry:
    """Sums since the pool was started. `summary` is what is shown and stored."""

    builders: int = 0
    devices: int = 0
    _busy_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _depth_s: float = 0.0
    _most: int = 0
    _began: float | None = None
    _fed: float | None = None
    _last: float = 0.0
    _depth: int = 0
    _statuses: Counter[str] = field(default_factory=Counter)
    _tiers: Counter[str] = field(default_factory=Counter)
    _seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _cached: int = 0
    _on_device: int = 0

    def tick(self, ready: int) -> None:
        """The queue between builders and devices holds `ready` candidates from now on."""
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        self._fed = now if self._fed is None and ready else self._fed
        self._depth_s += self._depth * (now - self._last) if self._last else 0.0
        self._last, self._depth, self._most = now, ready, max(self._most, ready)

    def worked(self, kind: str, seconds: float) -> None:
        """One of the `builders` or `devices` was busy for so long."""
        self._busy_s[kind] += seconds

    def reached(self, verdict: Verdict) -> None:
        self._statuses[verdict.status.value] += 1
        if verdict.build_tier:
            self._tiers[verdict.build_tier] += 1
            self._cached += verdict.build_cached
        self._seconds["build_s"] += verdict.build_s
        if verdict.run_s > 0:
            self._on_device += 1
            self._seconds["run_s"] += verdict.run_s
        for name in Phases.model_fields if verdict.phases else ():
            self._seconds[name] += getattr(verdict.phases, name)

    def summary(self) -> Message:
        """Plain numbers: seconds, shares in [0, 1], counts. `device_busy_share` is of the time
        since the first finished build.

        `built` counts candidates that a header tier was tried for; the tiers' shares and
        `cache_hit_share` are of these.
        """
        wall_s = max(1e-9, self._last - self._began) if self._began is not None else 0.0
        fed_s = max(1e-9, self._last - self._fed) if self._fed is not None else 0.0
        reached, built = sum(self._statuses.values()), sum(self._tiers.values())
        return {
            "candidates": reached,
            "wall_s": round(wall_s, 3),
            "candidates_per_hour": round(3600 * reached / wall_s, 1) if wall_s else 0.0,
            "builders": self.builders,
            "devices": self.devices,
            "builder_busy_share": _share(self._busy_s[BUILDERS], self.builders * wall_s),
            "device_busy_share": _share(self._busy_s[DEVICES], self.devices * fed_s),
            "device_s_per_candidate": round(self._busy_s[DEVICES] / reached, 4) if reached else 0.0,
            "queue_depth_mean": round(self._depth_s / wall_s, 2) if wall_s else 0.0,
            "queue_depth_most": self._most,
            "on_device": self._on_device,
            "cache_hit_share": _share(self._cached, built),
            "built": built,
            "lite_share": _share(self._tiers["lite"], built),
            "full_share": _share(self._tiers["full"], built),
            "seconds": {name: round(value, 3) for name, value in sorted(self._seconds.items())},
            "statuses": dict(sorted(self._statuses.items())),
        }

    @property
    def queue_depth(self) -> int:
        """Built candidates that wait for a device now."""
        return self._depth

    def line(self) -> str:
        """A few words for a progress line."""
        seen = self.summary()
        rate = f"{seen['candidates_per_hour']:,.0f}/h, " if seen["wall_s"] >= 1 else ""
        return f"{rate}devices {seen['device_busy_share']:.0%} busy, queue {self._depth}"


def _share(part: float, whole: float) -> float:
    return round(min(1.0, part / whole), 4) if whole else 0.0
