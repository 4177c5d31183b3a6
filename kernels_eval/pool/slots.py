"""A pool's workers, and the candidates that they work on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kernels_eval.judge.messages import Prepared
from kernels_eval.pool.local import Machine
from kernels_eval.pool.ray import Cluster
from kernels_eval.records import Candidate, KernelTask
from kernels_eval.sandbox.deaths import Deaths


@dataclass
class Item:
    """A candidate on its way to a verdict."""

    task: KernelTask
    candidate: Candidate
    prepared: Prepared | None = None
    deaths: Deaths = field(default_factory=Deaths)

    @property
    def alone(self) -> bool:
        return self.prepared is not None and self.prepared.alone

    def keep_alone(self) -> None:
        if self.prepared:
            self.prepared = self.prepared.model_copy(update={"alone": True})


@dataclass(eq=False)
class Slot:
    """The place of one worker, which may die and be replaced."""

    host: Machine | Cluster
    make: Callable[[], Any]
    item: Item | None = None
    pending: Any = None
    last_task: str = ""
    since: float = 0.0
    """When it was given work or started (time.monotonic)."""
    failures: int = 0
    """Times in a row that its actor died before it had started."""
    device: tuple[str, str] | None = None
    """Node and device of a started actor; lanes of one device share it."""
    crowded: bool = False
    """Whether another lane was at work during the present call."""
    reserved: Item | None = None
    """What runs alone here once the other lanes are done."""
    vacated: bool = True

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.actor, self.item, self.device, self.vacated = self.make(), None, None, True
        self.pending, self.since = self.host.started(self.actor), time.monotonic()

    @property
    def idle(self) -> bool:
        return self.pending is None

    @property
    def alone(self) -> bool:
        return self.reserved is not None or (self.item is not None and self.item.alone)

    def vacate(self) -> None:
        self.vacated = True
        self.pending, self.since = self.host.call(self.actor, "vacate"), time.monotonic()

    def build(self, item: Item, *, gives_way: bool) -> None:
        self._begin("build", item, gives_way)

    def run(self, item: Item) -> None:
        self.vacated = False
        self._begin("run", item)

    def _begin(self, method: str, item: Item, *more: bool) -> None:
        request = (item.task, item.candidate, item.prepared, item.deaths.blamed)
        self.pending = self.host.call(self.actor, method, *request, *more)
        self.item, self.since = item, time.monotonic()
