"""Inputs that hold a state for long, on which a task's last outputs tell what came before it: a
kernel that reads the last part of its inputs, or what is near, is wrong there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import Any

import torch
from torch import Tensor

from kernels_eval.config import HELD_S, HELD_TRIES, SAME_ANSWER_RTOL
from kernels_eval.model.held import axes_of, lengths_of, may_hold
from kernels_eval.model.measurement import as_real, computable
from kernels_eval.model.values import flattened, rebuilt
from kernels_eval.protocol import (
    HELD,
    LASTING_STATES,
    MUTATED,
    FindLasting,
    FoundLasting,
    InputPlan,
    handles,
)
from kernels_eval.reference.expected_values import ExpectedValues
from kernels_eval.reference.own_errors import copied
from kernels_eval.reference.task_model import REFUSALS


class LastingStates:
    """Of one task."""

    def __init__(self, values: ExpectedValues) -> None:
        self.task = values.task

    @handles(FindLasting)
    def find_lasting(self, request: FindLasting) -> FoundLasting:
        """Those that tell most."""
        random, started = Random(request.seed), self.task.work_stamp()
        plan = self.task.plan
        assert plan
        values, _ = flattened(self.task.inputs(request.seed))
        lengths = lengths_of(values, plan.notes, singular=plan.singular)
        random.shuffle(lengths)
        best: dict[int, tuple[float, str]] = {}
        for length in lengths * HELD_TRIES:
            if self.task.work_s(started) > HELD_S:
                break
            name = f"{MUTATED}_{random.getrandbits(31)}{HELD}{length}{request.domain}"
            share = self._share_told(request.seed, name, length, plan)
            best[length] = max(best.get(length, (0.0, "")), (share, name))
            if sum(each > 1 / 2 for each, _ in best.values()) == len(LASTING_STATES):
                break
        told = sorted((each for each in best.values() if each[0]), reverse=True)
        return FoundLasting(found=[name for _, name in told[: len(LASTING_STATES)]])

    def _share_told(self, seed: int, name: str, length: int, plan: InputPlan) -> float:
        """How many outputs of the last half change with the first eighth of what has this
        length."""
        with suppress(*REFUSALS):
            inputs = self.task.inputs(seed, name)
            others, _ = flattened(self.task.inputs(seed + 1))
            before = copied(self.task.outputs(copied(inputs)))
            leaves, form = flattened(inputs)
            for x, other, note in zip(leaves, others, plan.notes, strict=False):
                if may_hold(x, note, singular=plan.singular):
                    _begin_as(x, other, length)
            after = self.task.outputs(rebuilt(leaves, form))
            return _share_of_last(before, after, length)
        return 0.0


def _begin_as(x: Tensor, other: Tensor, length: int) -> None:
    """Give it the other's first eighth along each axis of this length."""
    with torch.no_grad():
        for axis in axes_of(x, length):
            part = (axis, 0, length // 8)
            x.narrow(*part).copy_(other.narrow(*part))


def _share_of_last(before: Sequence[Any], after: Sequence[Any], length: int) -> float:
    """How many outputs differ: along axes of this length, of the last half, else of all."""
    changed = count = 0
    for one, other in zip(before, after, strict=True):
        one, other = (computable(as_real(x.detach())) for x in (one, other))
        if one.shape != other.shape or not bool(torch.isfinite(one).all()):
            return 0.0
        for axis in axes_of(one, length):
            part = (axis, length - length // 2, length // 2)
            one, other = one.narrow(*part), other.narrow(*part)
        apart = (one.double() - other.double()).abs()
        least = SAME_ANSWER_RTOL * float(one.double().square().mean().sqrt())
        changed += int((apart > least).sum())
        count += one.numel()
    return changed / max(1, count)
