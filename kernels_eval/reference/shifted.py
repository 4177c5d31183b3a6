"""Which weights a task takes far from where its constructor makes them."""

from __future__ import annotations

from contextlib import suppress

from torch import Tensor

from kernels_eval.config import MOST_SHIFTED, REACH_S, ROW_SHIFTS
from kernels_eval.model.shifts import may_shift, shift_weights, shifted_form
from kernels_eval.model.weights import parameters_of, squeezed
from kernels_eval.protocol import DECLARED, FindShifted, FoundShifted, handles
from kernels_eval.reference.expected_values import ExpectedValues
from kernels_eval.reference.infinities import finite_share
from kernels_eval.reference.own_errors import same_shapes
from kernels_eval.reference.task_model import REFUSALS


class Shifted:
    """Of one task."""

    def __init__(self, values: ExpectedValues) -> None:
        self.values, self.task = values, values.task

    @handles(FindShifted)
    def find_shifted(self, request: FindShifted) -> FoundShifted:
        """One form of all that the task takes, and its opposite where few numbers are shifted."""
        runner, started = self.task.runner, self.task.work_stamp()
        # a row for padding stays what it is
        free = [each for each in self._weights() if each[1] not in runner.spec.padded]
        held = may_shift(free)
        keys = sorted(held, key=lambda key: held[key].numel())[:MOST_SHIFTED]
        taken: list[str] = []
        try:
            if not self._takes(shifted_form(keys), request):
                for key in keys:
                    alone = shifted_form([*taken, key])
                    if self.task.work_s(started) < REACH_S and self._takes(alone, request):
                        taken.append(key)
                keys = taken
        finally:
            runner.model = runner.build()
        few = any(held[key].numel() < len(ROW_SHIFTS) for key in keys)
        forms = [shifted_form(keys), shifted_form(keys, back=True)][: 1 + few]
        return FoundShifted(found=forms if keys else [])

    def _takes(self, form: str, request: FindShifted) -> bool:
        self.task.runner.model = self.task.runner.build()
        shift_weights(self._weights(), request.weights_seed, form)
        with suppress(*REFUSALS):
            outputs = self.task.outputs(self.task.inputs(request.seed))
            usual = self.values.expected_outputs(DECLARED)
            return same_shapes(outputs, usual) and finite_share(outputs) == 1
        return False

    def _weights(self) -> list[tuple[Tensor, list[int]]]:
        return [(x, squeezed(x)) for x in parameters_of(self.task.runner.model).values()]
