"""What a task's own model errs by: against a float64 oracle, by plain addition in long sums, and by
the scatter of outputs where operators round otherwise.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels_eval.config import (
    BESIDE,
    ELEMENT_FACTOR,
    ENOUGH_ELEMENTS,
    FEW_OUTPUTS,
    MOST_CAST_ERROR,
    ORACLE_MAX_S,
    REPEATABLE_RTOL,
    SAMPLE_ROWS,
    SCATTER_DRAWS,
    SCATTER_UNITS,
    SCATTER_UNITS_HALF,
    SPREAD_ELEMENTS,
    UNKNOWN_OWN_ERROR,
)
from kernels_eval.model.correctness import merge
from kernels_eval.model.measurement import all_close, computable, measure, precision_of
from kernels_eval.model.values import flattened, leaves_of, map_tensors, rebuilt
from kernels_eval.model.weights import parameters_of
from kernels_eval.protocol import OTHER_ROUNDING, Comparison
from kernels_eval.reference.equal_elements import ChosenAs
from kernels_eval.reference.in_float64 import InFloat64, widened
from kernels_eval.reference.infinities import LargeNumbers, finite_share, told_share
from kernels_eval.reference.long_sums import FP64_UNITS, LongSums
from kernels_eval.reference.task_model import REFUSALS, TaskModel

OWN_FLOATS = ("reference_rms", "reference_max")
NO_ERROR = Comparison(rms=0.0, max=0.0, reference_rms=0.0)


class OwnErrors:
    """The errors of one task's model, as it is when it is asked."""

    def __init__(self, task: TaskModel) -> None:
        self.task, self.runner = task, task.runner
        self.oracle_max_bytes = 0
        self.samples = True
        self.infinite = False
        """Whether an operator of the task is given an infinity."""
        self.lengths = Counter[str]()
        """of the longest sums, by the kind of inputs that tells of their terms"""

    def of(
        self, inputs: list[Any], reference: list[Tensor], *, exact: bool, hard: bool = False
    ) -> list[Comparison]:
        """What rounding costs each output on these inputs: plain addition's error in long sums, the
        scatter of few outputs and, unless an oracle is exact, the reference's error on a few rows,
        or (`hard`, as it must be known there) the scatter of all.
        """
        found = [NO_ERROR] * len(reference)
        with suppress(*REFUSALS), LongSums() as sums:
            outputs = self.task.outputs(copied(inputs))
            found = [_cost(sums, output) for output in outputs]
            del outputs
            self.lengths |= sums.lengths
        if 0 < sum(map(_telling, reference)) < FEW_OUTPUTS:
            found = both(found, self.scatter(inputs, reference))
        if exact:
            return found
        asked = self.samples and OTHER_ROUNDING not in self.task.left_out
        for rows in self._narrowed(inputs, reference) if asked else ():
            with suppress(*REFUSALS):
                wanted, started = [x[:SAMPLE_ROWS] for x in reference], self.task.work_stamp()
                if not all_close(self.task.outputs(copied(rows)), wanted, REPEATABLE_RTOL):
                    continue
                right = self._in_float64(rows, wanted)
                if right is None:
                    continue
                own = list(map(own_error, wanted, right))
                self.samples = self.task.work_s(started) < ORACLE_MAX_S
                return both(found, own)
        units = [FP64_UNITS if precision_of(x.dtype) == "fp64" else 1 for x in reference]
        own_rms = [UNKNOWN_OWN_ERROR * unit for unit in units]
        if hard and sum(x.numel() for x in reference) > ENOUGH_ELEMENTS:
            own_rms = [1.0] * len(reference)
        elif hard:
            scatter = self.scatter(inputs, reference)
            own_rms = [
                max(own, each.scatter_rms) for own, each in zip(own_rms, scatter, strict=True)
            ]
        return [
            each.model_copy(update={"reference_rms": rms})
            for each, rms in zip(found, own_rms, strict=True)
        ]

    def beside(self, inputs: list[Any], reference: list[Tensor]) -> list[Comparison]:
        """What rounding costs here, by outputs of inputs and weights that are moved farther than
        rounding moves them, so that what turns over shows. Weights stay moved.
        """
        given, form = flattened(copied(inputs))
        notes = self.task.plan.notes if self.task.plan else []
        moved = [x for x, note in zip(given, notes, strict=False) if note.vary]
        for x in (*moved, *parameters_of(self.runner.model).values()):
            x.detach().mul_(1 + BESIDE * torch.randn_like(x))
        outputs = self.task.outputs(rebuilt(given, form))
        errors = map(measure, outputs, reference, reference)
        costs = [{"reference_rms": error.rms / BESIDE * 2**-23} for error in errors]
        return [NO_ERROR.model_copy(update=cost) for cost in costs]

    def scatter(
        self, inputs: list[Any], reference: list[Tensor], most: Sequence[float] = ()
    ) -> list[Comparison]:
        """The spread of each output where operators round otherwise, at most so much: the error of
        a single draw is chance."""
        found, started = [NO_ERROR] * len(reference), self.task.work_stamp()
        for moved in self.moves(inputs):
            with suppress(*REFUSALS):
                again = map(measure, reference, reference, moved)
                found = both(found, [x if x.precision else NO_ERROR for x in again])
            if self.task.work_s(started) > ORACLE_MAX_S:
                break
        limits = most or [1.0] * len(reference)
        scatter = [
            {
                "scatter_rms": min(each.reference_rms, limit),
                "scatter_max": min(each.reference_max, ELEMENT_FACTOR * limit),
            }
            for each, limit in zip(found, limits, strict=True)
        ]
        return [NO_ERROR.model_copy(update=each) for each in scatter]

    def moves(self, inputs: list[Any]) -> Iterator[list[Tensor]]:
        """Outputs where operators round otherwise, some times."""
        for move in range(SCATTER_DRAWS):
            with suppress(*REFUSALS):
                with ChosenAs():
                    moved = self.moved_outputs(inputs, move, SCATTER_UNITS, SCATTER_UNITS_HALF)
                yield moved

    def _narrowed(self, inputs: list[Any], reference: list[Tensor]) -> Iterator[list[Any]]:
        """The first rows of all inputs of as many rows as outputs, and of one of them alone; of a
        table that others are places in, all: out of bounds, a GPU ends the process."""
        sizes = {x.shape[0] if x.dim() else 1 for x in reference}
        fits = [isinstance(x, Tensor) and x.dim() > 0 and {x.shape[0]} == sizes for x in inputs]
        if self.task.plan and any(note.below in sizes for note in self.task.plan.notes):
            fits = [fit and not x.is_floating_point() for fit, x in zip(fits, inputs, strict=True)]
        for chosen in (fits, [fit and index == fits.index(True) for index, fit in enumerate(fits)]):
            if any(chosen) and max(sizes) > 2 * SAMPLE_ROWS:
                cut = zip(inputs, chosen, strict=True)
                yield [x[:SAMPLE_ROWS] if narrow else x for x, narrow in cut]

    def oracle(self, inputs: list[Any], reference: list[Tensor]) -> list[Tensor] | None:
        """The outputs in float64; None where impossible, or too much memory or work."""
        leaves = [*reference, *leaves_of(inputs)]
        size = sum(x.numel() * 8 for x in leaves if isinstance(x, Tensor))
        if 4 * size > self.oracle_max_bytes:
            return None
        started = self.task.work_stamp()
        outputs = self._in_float64(inputs, reference)
        if self.task.work_s(started) > ORACLE_MAX_S:
            self.oracle_max_bytes = 0  # the remaining trials take the fp32 reference
        return outputs

    def told_share(
        self, inputs: list[Any], reference: list[Tensor], exact: list[Tensor] | None
    ) -> float:
        """The share of finite elements, and of infinities that the task means (`infinities`)."""
        finite = finite_share(reference)
        if finite == 1 or exact is None or not self.infinite:
            return finite
        with_numbers = self._in_float64(inputs, reference, LargeNumbers(reference))
        return told_share(reference, exact, with_numbers) if with_numbers else finite

    def _in_float64(
        self,
        inputs: list[Any],
        reference: list[Tensor],
        given: LargeNumbers | None = None,
    ) -> list[Tensor] | None:
        """The model's float64 outputs, or None. A task's casts stay where they are its formula."""
        for widens in (True, False):
            mode = InFloat64(widens=widens)
            outputs = self.widened_outputs(inputs, reference, mode, given)
            if not mode.casts or (outputs and _is_rounding(reference, outputs)):
                break
        return outputs

    def widened_outputs(
        self,
        inputs: list[Any],
        reference: list[Tensor],
        mode: InFloat64,
        given: TorchDispatchMode | None,
    ) -> list[Tensor] | None:
        model, earlier = self.runner.model, self.runner.earlier
        try:
            self.task.require(OTHER_ROUNDING)
            self.runner.earlier = map_tensors(widened, earlier)
            if isinstance(model, torch.nn.Module):
                self.runner.model = copy.deepcopy(model)._apply(widened)
            with mode, given or nullcontext():
                outputs = self.task.outputs(map_tensors(widened, copied(inputs)))
            if not same_shapes(outputs, reference):
                return None
            return list(map(_representable, outputs, reference))
        except REFUSALS:
            return None
        finally:
            self.runner.model, self.runner.earlier = model, earlier
            self.runner.synchronise()

    def keeps_shapes(self, inputs: list[Any], reference: list[Tensor]) -> bool:
        """Whether outputs have the reference's shapes where operators round otherwise, too."""
        for move in range(SCATTER_DRAWS):
            try:
                with ChosenAs():
                    moved = self.moved_outputs(inputs, move, SCATTER_UNITS, SCATTER_UNITS_HALF)
            except REFUSALS:
                return False
            if not same_shapes(moved, reference):
                return False
        return True

    def moved_outputs(
        self, inputs: list[Any], seed: int, units: float, units_half: float | None = None
    ) -> list[Tensor]:
        """Outputs of other code of the same formula, which rounds otherwise by some units."""
        if units:
            self.task.require(OTHER_ROUNDING)
        generator = torch.Generator(self.runner.device).manual_seed(seed)
        given = copied(inputs)  # not moved themselves
        with LongSums(generator, units, units_half) if units else nullcontext():
            return self.task.outputs(given)


def both(one: Sequence[Comparison], other: Sequence[Comparison]) -> list[Comparison]:
    """The worst of two errors of each output."""
    return [merge(each) for each in zip(one, other, strict=True)]


def _cost(sums: LongSums, output: Tensor) -> Comparison:
    made = sums.made_with(output)
    return NO_ERROR.model_copy(
        update={
            "sequential_rms": made.error,
            "widest": made.widest,
            "only_chosen": sums.only_chosen(output),
            "ordered": made.ordered,
        }
    )


def own_error(reference: Tensor, oracle: Tensor) -> Comparison:
    found = measure(reference, oracle, reference)
    return NO_ERROR.model_copy(update={name: getattr(found, name) for name in OWN_FLOATS})


def _is_rounding(reference: list[Tensor], oracle: list[Tensor]) -> bool:
    own = map(own_error, reference, oracle)
    return all(each.reference_rms <= MOST_CAST_ERROR for each in own)


def copied(inputs: list[Any]) -> list[Any]:
    copies: list[Any] = map_tensors(torch.clone, inputs)
    return copies


def _representable(oracle: Tensor, reference: Tensor) -> Tensor:
    """The oracle, but the reference where its type cannot hold the value."""
    if not reference.is_floating_point() and not reference.is_complex():
        return oracle
    held = torch.isfinite(computable(oracle.to(reference.dtype)))
    return oracle if held.all() else torch.where(held, oracle, reference.to(oracle.dtype))


def same_shapes(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return [x.shape for x in one] == [x.shape for x in other]


def _telling(x: Tensor) -> int:
    """How many elements tell what rounding costs: of a small output, those that are not zero."""
    if not x.is_floating_point():
        return 0
    return x.numel() if x.numel() > SPREAD_ELEMENTS else int(torch.count_nonzero(computable(x)))
