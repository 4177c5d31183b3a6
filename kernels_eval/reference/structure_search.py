"""Which structures of its arguments a task takes, by asking it, and which arguments never vary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kernels_eval.config import FEWEST_NUMBERS, STRUCTURE_S, STRUCTURE_TRIES
from kernels_eval.model.measurement import as_real, computable, same_all
from kernels_eval.model.redraws import VARIATIONS_BY_DRAW
from kernels_eval.model.structures import (
    TOGETHER,
    Structure,
    may_have_structure,
    moves_of,
    structures_of,
)
from kernels_eval.model.values import leaves_of
from kernels_eval.protocol import (
    DECLARED,
    DOMAINS,
    FIXED,
    MUTATED,
    VARIED,
    WITHIN,
    FindStructures,
    FindUnvaried,
    FoundStructures,
    InputPlan,
    UnvariedArguments,
    handles,
)
from kernels_eval.reference.expected_values import ExpectedValues
from kernels_eval.reference.task_model import REFUSALS

FREE: Structure = ()
"""Of an argument that the task takes as other trials draw it."""
DRAWS = 4
"""How many draws of a structure a task must take."""
MUTATIONS = 3
"""Of how many it takes one, as the trial does."""


class Structures:
    def __init__(self, values: ExpectedValues) -> None:
        self.values, self.task = values, values.task

    @handles(FindStructures)
    def find_structures(self, request: FindStructures) -> FoundStructures:
        """Find the structures within which a task takes other values of its arguments."""
        own = self.task.plan
        assert own is not None
        leaves = leaves_of(self.task.inputs(request.seed))
        noted = leaves[: len(own.notes)]
        places = [index for index, x in enumerate(noted) if may_have_structure(x)]
        search = _Search(self.values, own, request.seed)
        try:
            plan = search.plan(places) if places else own
        finally:
            self.task.plan = own
        self.task.plan = plan
        return FoundStructures(plan=plan)

    @handles(FindUnvaried)
    def find_unvaried(self, request: FindUnvaried) -> UnvariedArguments:
        """Tensors that are as declared in all of these trials."""
        left: set[int] | None = None
        for name in request.trials:
            trial = self.values.known[name].trial
            own = leaves_of(self.task.inputs(trial.seed, shape=trial.shape))
            drawn = leaves_of(self.task.inputs_of(trial))
            if left is None:
                left = {i for i, x in enumerate(own) if isinstance(x, Tensor) and x.numel()}
            left = {i for i in left if same_all([own[i]], [drawn[i]])}
            if not left:
                break
        return UnvariedArguments(arguments=sorted(left or ()))


class _Search:
    def __init__(self, values: ExpectedValues, plan: InputPlan, seed: int) -> None:
        self.task, self.own, self.seed = values.task, plan, seed
        self.leaves = leaves_of(self.task.inputs(seed))
        self.usual = _forms(values.expected_outputs(DECLARED))
        self.tries, self.started = 0, self.task.work_stamp()

    def plan(self, places: Sequence[int]) -> InputPlan:
        if self._takes_free(places):
            return self.own
        found = {
            index: FREE if self.over or self._takes_free([index]) else FIXED for index in places
        }
        for _ in range(2):  # what divides another moves once that has a structure
            for index in places:
                if found[index] == FIXED:
                    found[index] = self._structure_of(index, found)
        found |= self._together(found)
        while not self._takes_all(found):
            last = max(i for i, structure in found.items() if structure not in (FREE, FIXED))
            found[last] = FIXED
        return _with(self.own, found)

    @property
    def over(self) -> bool:
        return self.late or self.tries >= STRUCTURE_TRIES

    @property
    def late(self) -> bool:
        return self.task.work_s(self.started) > STRUCTURE_S

    def _takes_free(self, places: Sequence[int]) -> bool:
        """Whether a task takes these arguments as trials draw them, others as declared."""
        plan = self._plan_of(dict.fromkeys(places, FREE))
        vary = [index for index in places if self.own.notes[index].vary]
        if len(places) == 1 and vary:
            normal = (f"normal{domain}" for domain in DOMAINS)
            return any(self._takes(plan, name) for name in (*VARIATIONS_BY_DRAW, *normal))
        names = [f"{MUTATED}_{self.seed + number}{WITHIN}" for number in range(MUTATIONS)]
        varied = any(self._takes(plan, name) for name in VARIATIONS_BY_DRAW)
        notes = self.own.notes
        stay = [index for index in places if not (notes[index].vary or notes[index].varied)]
        return varied and any(self._takes(plan, name, stay) for name in names)

    def _structure_of(self, index: int, found: Mapping[int, Structure]) -> Structure:
        for structure in structures_of(self.leaves, index, self.own.notes[index]):
            if self.over:
                break
            if self._takes_all({**found, index: structure}, [index]):
                return structure
        return FIXED

    def _together(self, found: Mapping[int, Structure]) -> dict[int, Structure]:
        """What several arguments share that the task takes as declared only if one alone varies."""
        fixed = [index for index, structure in found.items() if structure == FIXED]
        for move in TOGETHER:
            suit = [index for index in fixed if move in moves_of(self.leaves[index])]
            moved = dict.fromkeys(suit, move)
            if len(suit) > 1 and not self.late and self._takes_all({**found, **moved}, suit):
                return moved
        return {}

    def _takes_all(self, found: Mapping[int, Structure], changing: Sequence[int] = ()) -> bool:
        """Whether a task takes arguments with these structures."""
        structured = {i: each for i, each in found.items() if each not in (FREE, FIXED)}
        plan = self._plan_of(structured)
        seeds = range(self.seed, self.seed + DRAWS)
        return not structured or all(self._takes(plan, VARIED, changing, seed) for seed in seeds)

    def _plan_of(self, found: Mapping[int, Structure]) -> InputPlan:
        """Of arguments with these structures, and of others as declared."""
        return _with(self.own, {i: FIXED for i in range(len(self.own.notes))} | {**found})

    def _takes(
        self, plan: InputPlan, name: str, changing: Sequence[int] = (), seed: int | None = None
    ) -> bool:
        """Whether there is an answer of the usual form, and none of `changing` is as declared."""
        self.tries += 1
        self.task.plan = plan
        seed = self.seed if seed is None else seed
        try:
            inputs = self.task.inputs(seed, name)
            if changing:
                leaves, own = leaves_of(inputs), leaves_of(self.task.inputs(seed))
                if any(torch.equal(leaves[i], own[i]) for i in changing):
                    return False
            return _forms(self.task.outputs(inputs)) == self.usual
        except REFUSALS as refusal:
            if "CUDA error" in str(refusal):
                raise
            return False


def _forms(outputs: Sequence[Tensor]) -> list[object]:
    """What stays where values decide the sizes of outputs."""
    return [(x.dim(), x.dtype, x.numel() > 0, _answers(computable(as_real(x)))) for x in outputs]


def _answers(x: Tensor) -> bool:
    """Whether it is of numbers; an infinity may be one (`masked_fill`)."""
    finite = x.isfinite()
    return not bool(x.isnan().any()) and float(finite.double().mean()) >= FEWEST_NUMBERS


def _with(plan: InputPlan, found: Mapping[int, Structure]) -> InputPlan:
    notes = [
        note.model_copy(
            update={"structure": found[index], "vary": False} if found.get(index) else {}
        )
        for index, note in enumerate(plan.notes)
    ]
    return plan.model_copy(update={"notes": notes})
