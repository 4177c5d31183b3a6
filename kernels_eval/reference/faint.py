"""Inputs on which a task's answer is tiny: all of them small, or one argument far from the others.
What a kernel leaves out of an answer of ordinary size may be all of that one.

Guarantees: the answer is finite and no multiple of the usual one.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kernels_eval.config import (
    APART_HALVINGS,
    APART_STEPS,
    FAINT_EXPONENT,
    FAINT_SHARE,
    LEAST_FAINT,
    MOST_APART,
    REACH_S,
    REPEATABLE_RTOL,
)
from kernels_eval.model.measurement import all_close
from kernels_eval.model.redraws import suiting_faint
from kernels_eval.model.values import leaves_of
from kernels_eval.protocol import APART, DECLARED, FAINT, FindFaint, FoundFaint, handles
from kernels_eval.reference.expected_values import ExpectedValues
from kernels_eval.reference.infinities import finite_share
from kernels_eval.reference.own_errors import same_shapes
from kernels_eval.reference.task_model import REFUSALS

DEGREES = (1, 2, 3)
"""Powers of a factor that an answer may have which is a multiple."""


class Faint:
    """Of one task."""

    def __init__(self, values: ExpectedValues) -> None:
        self.values, self.task = values, values.task
        self.started: Any = None

    @handles(FindFaint)
    def find_faint(self, request: FindFaint) -> FoundFaint:
        self.started, plan = self.task.work_stamp(), self.task.plan
        assert plan
        suiting = suiting_faint(leaves_of(self.task.inputs(request.seed)), plan)
        found = []
        if suiting and self._is_faint(request.seed, name := f"{FAINT}_{FAINT_EXPONENT}"):
            found.append(name)
        for index in suiting[:MOST_APART] if request.apart and len(suiting) > 1 else ():
            if name := self._apart(request.seed, index):
                found.append(name)
                break
        return FoundFaint(found=found)

    def _is_faint(self, seed: int, name: str) -> bool:
        """Whether the answer is tiny there, but no multiple of the usual one."""
        usual = self.values.expected_outputs(DECLARED)
        if not LEAST_FAINT <= self._share(seed, name) <= FAINT_SHARE:
            return False
        outputs = self.task.outputs(self.task.inputs(seed, name))
        for degree in DEGREES:
            larger = [x * 2.0 ** (-FAINT_EXPONENT * degree) for x in outputs]
            if all_close(larger, usual, REPEATABLE_RTOL):
                return False
        return True

    def _apart(self, seed: int, index: int) -> str:
        """The shift of an argument that gives the least answer which is still told; none where all
        answers are of ordinary size."""
        near, found = 0.0, ""
        for step in APART_STEPS:
            far, share = float(step), self._share(seed, f"{APART}_{index}_{step}")
            if share < FAINT_SHARE:
                break
            near = far
        else:
            return ""
        for _ in range(APART_HALVINGS):
            if share >= LEAST_FAINT:
                near, found = far, f"{APART}_{index}_{far}"
                break
            middle = (near + far) / 2
            name = f"{APART}_{index}_{middle}"
            share_there = self._share(seed, name)
            if share_there < LEAST_FAINT:
                far = middle
            else:
                near = middle
                found = name if share_there < FAINT_SHARE else found
        return found

    def _share(self, seed: int, name: str) -> float:
        """The size of the answer as a share of the usual one's, the least of all outputs; infinite
        where there is none."""
        usual = self.values.expected_outputs(DECLARED)
        if self.task.work_s(self.started) > REACH_S:
            return float("inf")
        with suppress(*REFUSALS):
            outputs = self.task.outputs(self.task.inputs(seed, name))
            if same_shapes(outputs, usual) and finite_share(outputs) == 1:
                sizes = (
                    float(x.double().square().mean().sqrt() / y.double().square().mean().sqrt())
                    for x, y in zip(outputs, usual, strict=True)
                )
                return min(sizes, default=float("inf"))
        return float("inf")
