"""Which worker takes what where several share a device: what its neighbours may have spoilt, or
leave no room for, is judged alone."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kernels_eval.pool.slots import Item, Slot
from kernels_eval.records import Reason, Verdict

DOUBTED = frozenset(
    {
        Reason.OUT_OF_MEMORY,
        Reason.CUDA_ERROR,
        Reason.LOAD,
        Reason.RUN,
        Reason.REFERENCE_FAILED,
        Reason.STREAM_ESCAPE,
        Reason.BACKGROUND_WORK,
    }
)
"""Reasons that a neighbour may be to blame for: such a candidate is judged again alone."""


@dataclass
class Lanes:
    """The workers of all devices, `count` of each."""

    runners: list[Slot]
    count: int
    large: set[str] = field(default_factory=set)
    """Tasks that leave no room for a neighbour."""
    _failing: set[str] = field(default_factory=set)
    """Tasks whose reference has failed without a neighbour."""

    def beside(self, slot: Slot) -> list[Slot]:
        others = (lane for lane in self.runners if lane is not slot)
        return [lane for lane in others if lane.device == slot.device] if self.count > 1 else []

    def doubts(self, slot: Slot, verdict: Verdict) -> bool:
        """Whether a neighbour may be to blame for a verdict; what it says of its task is noted."""
        reason, task = verdict.reason, verdict.task_id
        if slot.crowded and reason in DOUBTED and task not in self._failing:
            if reason is Reason.OUT_OF_MEMORY:
                self.large.add(task)
            return True
        if reason is Reason.REFERENCE_FAILED:
            self._failing.add(task)
        return False

    def give_work(self, slot: Slot, ready: deque[Item]) -> None:
        """Run the next item. One that must be alone waits for the device's other lanes; for a large
        task they also give back memory.
        """
        beside = self.beside(slot)
        if any(lane.alone for lane in beside):
            return
        item = slot.reserved or (self._next(slot, ready) if ready else None)
        if item is None:
            return
        if large := item.task.task_id in self.large:
            item.keep_alone()
        if item.alone:
            slot.reserved = item
            for lane in beside:
                if large and lane.idle and not lane.vacated:
                    lane.vacate()
            if not all(lane.idle for lane in beside):
                return
            slot.reserved = None
        slot.crowded = any(lane.item for lane in beside)
        for lane in beside:
            lane.crowded = True
        slot.run(item)

    def _next(self, slot: Slot, ready: deque[Item]) -> Item:
        served = {other.last_task for other in self.runners if other is not slot}
        names = [item.task.task_id for item in ready]
        own = (index for index, name in enumerate(names) if name == slot.last_task)
        free = (index for index, name in enumerate(names) if name not in served)
        index = next(own, next(free, 0))
        item = ready[index]
        del ready[index]
        slot.last_task = item.task.task_id
        return item
