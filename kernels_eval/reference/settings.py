"""Other arguments of a task's constructor: it is asked how far each may go, alone, from far to
near, and then all of them in one direction, or one. Integers that are sizes stay.

Guarantees: a model made with other settings has the declared weights' shapes, and gives on declared
inputs another answer of the usual form, with no fewer finite numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random
from typing import Any

from torch import Tensor

from kernels_eval.config import (
    LEAST_COUNT,
    LEAST_TEXT,
    REPEATABLE_RTOL,
    SETTING_DOUBLINGS,
    SETTINGS_S,
)
from kernels_eval.model.invariants import note_of
from kernels_eval.model.measurement import all_close
from kernels_eval.model.redraws import VARIED_OTHERWISE, other_text, redrawn
from kernels_eval.model.values import flattened, leaves_of
from kernels_eval.model.weights import parameters_of, squeezed
from kernels_eval.protocol import (
    DECLARED,
    MOVED,
    OTHER_SETTINGS,
    FindSettings,
    FoundSettings,
    handles,
)
from kernels_eval.reference.expected_values import ExpectedValues
from kernels_eval.reference.own_errors import copied
from kernels_eval.reference.reaches import is_usual
from kernels_eval.reference.task_model import REFUSALS


class Settings:
    """Of one task."""

    def __init__(self, values: ExpectedValues) -> None:
        self.values, self.task = values, values.task
        self.started: Any = None

    @handles(FindSettings)
    def find_settings(self, request: FindSettings) -> FoundSettings:
        task, runner = self.task, self.task.runner
        self.started, own = task.work_stamp(), runner.model
        self.shapes = _shapes_of(own)
        self.inputs = task.inputs(request.seed)
        tensors = [x for x in leaves_of(self.inputs) if isinstance(x, Tensor)]
        self.sizes = {n for shape in [*self.shapes, *(x.shape for x in tensors)] for n in shape}
        leaves, self.form = flattened(list(task.arguments(runner.spec)))
        try:
            for name, above in zip(OTHER_SETTINGS, (True, False), strict=True):
                random = Random(f"{request.seed} {name}")
                if found := self._changed(leaves, random, above=above):
                    task.settings[name] = found, self.form
        finally:
            runner.model = own
            runner.synchronise()
        return FoundSettings(found=[name for name in OTHER_SETTINGS if name in task.settings])

    def _changed(self, leaves: list[Any], random: Random, *, above: bool) -> list[Any]:
        """All that may change this way, or one of them; empty where nothing may."""
        alone = list[list[Any]]()
        every = [*leaves]
        for index, value in enumerate(leaves):
            if type(value) is int and value in self.sizes:
                continue  # larger weights take as long as all else
            for other in _others(value, random, above=above):
                changed = [*leaves[:index], other, *leaves[index + 1 :]]
                if self._takes(changed):
                    alone.append(changed)
                    every[index] = other
                    break
        if len(alone) > 1 and self._takes(every):
            return every
        return random.choice(alone) if alone else []

    def _takes(self, leaves: list[Any]) -> bool:
        """Whether there is another answer, of the usual form; none once time is over."""
        task, runner = self.task, self.task.runner
        if task.work_s(self.started) > SETTINGS_S:
            return False
        usual = self.values.expected_outputs(DECLARED)
        task.settings["asked"] = leaves, self.form
        try:
            with task.under("asked"):
                runner.model = runner.build()
            if _shapes_of(runner.model) != self.shapes:
                return False
            outputs = task.outputs(copied(self.inputs))
        except REFUSALS as refusal:
            if "CUDA error" in str(refusal):
                raise
            return False
        finally:
            del task.settings["asked"]
        differs = not all_close(outputs, usual, REPEATABLE_RTOL)
        return differs and is_usual(outputs, usual)


def _shapes_of(model: Any) -> list[list[int]]:
    return list(map(squeezed, parameters_of(model).values()))


def _others(value: Any, random: Random, *, above: bool) -> Iterator[Any]:
    """Other values, from far to near."""
    if isinstance(value, Tensor):
        note = note_of([value])
        for name in (VARIED_OTHERWISE, MOVED):
            yield redrawn(value, note, random.getrandbits(31), name)
    elif type(value) is float and math.isfinite(value):
        for doublings in SETTING_DOUBLINGS:
            by = 2.0 ** (doublings * random.uniform(0.5, 1))
            yield (value or 1.0) * by if above else value / by
    elif type(value) is int and abs(value) >= LEAST_COUNT:
        far = random.uniform(1.5, 2)
        for other in (value * far, value * 2) if above else (value / far, value / 2):
            yield int(other)
        for step in (2, 1):
            yield value + step if above else value - step
    elif type(value) is str and len(value) >= LEAST_TEXT:
        yield other_text(value, random, above=above)
