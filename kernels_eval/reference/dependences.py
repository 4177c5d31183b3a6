"""What a task's answer depends on: its inputs, how much of them, and its weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernels_eval.config import BYTES_PROBES, ENOUGH_ELEMENTS, SAME_ANSWER_RTOL
from kernels_eval.model.measurement import all_close, computable, same_all
from kernels_eval.model.renewals import renew
from kernels_eval.model.values import flattened, leaves_of, rebuilt
from kernels_eval.model.weights import randomise_weights, redraw_statistics
from kernels_eval.protocol import (
    EstimateUsedBytes,
    FindIgnoredInputs,
    IgnoredInputs,
    TryOtherWeights,
    UsedBytes,
    WeightsMatter,
    handles,
)
from kernels_eval.reference.expected_values import ExpectedValues
from kernels_eval.reference.task_model import REFUSALS


class Dependences:
    """Of one task, once its own answer is known."""

    def __init__(self, values: ExpectedValues) -> None:
        self.values, self.task, self.runner = values, values.task, values.runner

    @handles(FindIgnoredInputs)
    def find_ignored_inputs(self, request: FindIgnoredInputs) -> IgnoredInputs:
        seed = request.seed
        if sum(x.numel() for x in self.values.like) > ENOUGH_ELEMENTS:
            return IgnoredInputs(ignored=[])  # another copy of everything for a flag is too much
        base = self.task.outputs(self.task.inputs(seed))
        ignored = []
        for index in self._varying():
            leaves, form = flattened(self.task.inputs(seed))
            leaves[index] = leaves_of(self.task.inputs(seed + 1, "normal"))[index]
            if not self._differs(base, rebuilt(leaves, form)):
                ignored.append(index)
        return IgnoredInputs(ignored=ignored)

    def _varying(self) -> list[int]:
        assert self.task.plan
        return [index for index, note in enumerate(self.task.plan.notes) if note.vary]

    def _differs(self, base: list[Tensor], inputs: list[Any]) -> bool:
        """Whether these inputs change the output; a refusal depends on them."""
        try:
            return not same_all(base, self.task.outputs(inputs))
        except REFUSALS:
            return True

    @handles(EstimateUsedBytes)
    def estimate_used_bytes(self, request: EstimateUsedBytes) -> UsedBytes:
        """Estimated by changing one of 8 spread pieces of each argument at a time."""
        seed = request.seed
        base = self.task.outputs(self.task.inputs(seed))
        used = 0.0
        for index in self._varying():
            hits = 0
            for probe in range(BYTES_PROBES):
                leaves, form = flattened(self.task.inputs(seed))
                flat = leaves[index].reshape(-1)
                start = flat.numel() * probe // BYTES_PROBES
                piece = flat[start : start + max(1, flat.numel() // 64)]
                piece.copy_(computable(piece) + 3.0)
                leaves[index] = flat.reshape(leaves[index].shape)
                hits += self._differs(base, rebuilt(leaves, form))
            used += leaves[index].nbytes * hits / BYTES_PROBES
        return UsedBytes(bytes=used)

    @handles(TryOtherWeights)
    def try_other_weights(self, request: TryOtherWeights) -> WeightsMatter:
        seed, only = request.seed, request.only
        base = self.task.outputs(self.task.inputs(seed))
        try:
            self.runner.model = self.runner.build()
            if request.drawn:
                renew(self.runner.model, self.runner.build(seed + 1), request.drawn)
                outputs = self.task.outputs(self.task.inputs(seed))
                return WeightsMatter(matter=not all_close(outputs, base, SAME_ANSWER_RTOL))
            randomise_weights(self.runner.model, seed, only=only, padded=self.runner.spec.padded)
            redraw_statistics([] if only else self.runner.statistics, seed)
            outputs = self.task.outputs(self.task.inputs(seed))
        finally:
            self.runner.model = self.runner.build()
        return WeightsMatter(matter=not all_close(outputs, base, SAME_ANSWER_RTOL))
