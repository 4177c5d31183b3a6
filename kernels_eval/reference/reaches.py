"""How far a task's floats may leave their declared ranges: it is asked, each argument alone, in
growing steps, and then between the last that it takes and the first that it does not; and which
may be any numbers where others may not.

Guarantees: at both ends of a reach the task gives an answer of the usual form, with no fewer
finite numbers, whose size can be compared. Not that it does so for several reaches at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kernels_eval.config import (
    EDGE_HALVINGS,
    EDGE_MARGIN,
    LEAST_TOLD,
    MOST_TOLD,
    REACH_DOUBLINGS,
    REACH_S,
    REACHES,
)
from kernels_eval.model.measurement import as_real, computable
from kernels_eval.model.values import flattened, rebuilt
from kernels_eval.protocol import (
    DECLARED,
    DOMAINS,
    REACHED,
    FindFree,
    FindReach,
    FoundReach,
    InputNote,
    handles,
)
from kernels_eval.reference.expected_values import ExpectedValues
from kernels_eval.reference.infinities import finite_share
from kernels_eval.reference.own_errors import copied, same_shapes
from kernels_eval.reference.task_model import REFUSALS

DOUBLINGS = tuple(map(float, range(1, REACH_DOUBLINGS + 1)))
FREE = ("normal", "mixed")
"""Draws in which arguments are taken that may be any numbers."""
NARROWER = tuple(domain for domain in DOMAINS if domain not in ("", REACHED))
Moved = Callable[[float], Any]
"""An argument, moved so far in one direction."""


class Reaches:
    """Of one task."""

    def __init__(self, values: ExpectedValues) -> None:
        self.values, self.task = values, values.task
        self.started: Any = None

    @handles(FindReach)
    def find_reach(self, request: FindReach) -> FoundReach:
        """Note the least and the largest number of each argument of floats."""
        plan = self.task.plan
        assert plan
        self.started = self.task.work_stamp()
        leaves, self.form = flattened(self.task.inputs(request.seed))
        notes = [
            note.model_copy(update={"reach": self._reach(leaves, index, note)})
            for index, note in enumerate(plan.notes)
        ]
        self.task.plan = plan.model_copy(update={"notes": notes})
        return FoundReach(plan=self.task.plan)

    @handles(FindFree)
    def find_free(self, request: FindFree) -> FoundReach:
        """Note the arguments that may be any numbers, each alone, and then all of them with the
        others in a domain."""
        own = self.task.plan
        assert own
        self.started = self.task.work_stamp()
        leaves, self.form = flattened(self.task.inputs(request.seed))
        vary = [i for i, note in enumerate(own.notes) if note.vary and not note.structure]
        draws = [flattened(self.task.inputs(request.seed, name))[0] for name in FREE]

        def is_free(index: int) -> bool:
            alone = ([*leaves[:index], each[index], *leaves[index + 1 :]] for each in draws)
            return all(map(self._takes, alone))

        free = list(filter(is_free, vary)) if len(vary) > 1 else []
        if not free:
            return FoundReach(plan=own)
        notes = [
            note.model_copy(update={"free": index in free}) for index, note in enumerate(own.notes)
        ]
        self.task.plan = own.model_copy(update={"notes": notes})
        if not any(self._takes_drawn(request.seed, domain) for domain in NARROWER):
            self.task.plan = own
        return FoundReach(plan=self.task.plan)

    def _takes_drawn(self, seed: int, domain: str) -> bool:
        """Whether all arguments may be drawn in a domain, but for those that are free."""
        drawn = (self.task.inputs(seed, f"{name}{domain}") for name in FREE)
        return all(self._takes(flattened(each)[0]) for each in drawn)

    def _reach(self, leaves: list[Any], index: int, note: InputNote) -> tuple[float, ...]:
        value = leaves[index]
        if note.varied == "number":
            steps, ways = DOUBLINGS, [_scaled(value, sign) for sign in (-1, 1)]
        elif note.vary and not note.structure and not value.is_complex():
            steps, ways = REACHES, [_widened(value, side) for side in (0, 1)]
        else:
            return ()
        least, largest = (way(self._farthest(leaves, index, way, steps)) for way in ways)
        if isinstance(least, Tensor):
            return float(least.min()), float(largest.max())
        return least, largest

    def _farthest(self, leaves: list[Any], index: int, way: Moved, steps: Sequence[float]) -> float:
        """How far an argument may be moved this way."""

        def takes(far: float) -> bool:
            moved = [*leaves]
            moved[index] = way(far)
            return self._takes(moved)

        taken = 0.0
        for step in steps:
            if not takes(step):
                break
            taken = step
        else:
            return taken
        for _ in range(EDGE_HALVINGS):
            middle = (taken + step) / 2
            taken, step = (middle, step) if takes(middle) else (taken, middle)
        return EDGE_MARGIN * taken

    def _takes(self, leaves: list[Any]) -> bool:
        """Whether there is an answer as on declared inputs; none once time is over."""
        if self.task.work_s(self.started) > REACH_S:
            return False
        usual = self.values.expected_outputs(DECLARED)
        try:
            outputs = self.task.outputs(copied(rebuilt(leaves, self.form)))
        except REFUSALS as refusal:
            if "CUDA error" in str(refusal):
                raise
            return False
        return is_usual(outputs, usual)


def is_usual(outputs: Sequence[Tensor], usual: Sequence[Tensor]) -> bool:
    """Whether an answer has the usual form, no fewer finite numbers, and digits to compare."""
    if not same_shapes(outputs, usual) or finite_share(outputs) < finite_share(usual):
        return False
    return all(map(_is_told, outputs, usual))


def _scaled(value: float, sign: int) -> Moved:
    return lambda far: value * 2.0 ** (sign * far)


def _widened(value: Tensor, side: int) -> Moved:
    """With numbers below its least, or beyond its largest, by a share of its range."""
    own = computable(value.detach())
    fixed = own.amin() if side else own.amax()
    return lambda far: (fixed + (own - fixed) * (1 + far)).to(value.dtype)


def _is_told(x: Tensor, usual: Tensor) -> bool:
    """Whether an output's numbers have digits to compare, unless the usual one's have none."""
    if not x.is_floating_point():
        return True
    sizes = (computable(as_real(y)).double().nan_to_num(0, 0, 0) for y in (x, usual))
    size, own = (float(y.square().mean().sqrt()) if y.numel() else 0.0 for y in sizes)
    return not own or LEAST_TOLD <= size <= MOST_TOLD
