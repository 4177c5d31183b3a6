"""What a task's model keeps from one call to the next, or leaves in its attributes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from kernels_eval.config import (
    LARGE_VIEW,
    LEAST_IN_A_ROW,
    LONG_ROW,
    LONG_ROW_S,
    MOST_IN_A_ROW,
    NEAR_SHARE,
    ORACLE_MAX_S,
    REPEATABLE_RTOL,
    TIMED_INPUT_BYTES,
)
from kernels_eval.model.measurement import all_close
from kernels_eval.model.side_effects import (
    State,
    changed_state,
    holds_integers,
    plain_values,
    state_of,
    tensors_of,
)
from kernels_eval.model.values import leaves_of, map_tensors
from kernels_eval.protocol import SideEffects, by_kind
from kernels_eval.reference.own_errors import copied
from kernels_eval.reference.task_model import REFUSALS, TaskModel


def calls_in_a_row(
    task: TaskModel, effects: SideEffects, first: list[Tensor], changed: list[str]
) -> SideEffects:
    """How many calls in a row a model takes that has `changed` in its first, whether later outputs
    tell of that, and whether calls are alike once its buffers are put back.
    """
    runner, seed = task.runner, task.runner.spec.seed

    def answer(model: Any, seed: int = seed) -> list[Tensor]:
        runner.model = model
        return copied(task.outputs(task.inputs(seed)))

    def answer_near(model: Any) -> list[Tensor]:
        runner.model = model
        return copied(task.outputs(map_tensors(_near, task.inputs(seed))))

    def differ(one: list[Tensor], other: list[Tensor]) -> bool:
        return not all_close(one, other, REPEATABLE_RTOL)

    def differs_without(names: list[str]) -> bool:
        model = runner.build()
        try:
            answer(model), answer(model, seed + 1)
            _copy_into(model, runner.build(), names)
            return differ(later, answer(model))
        except REFUSALS:
            return True

    used, started, tells, later = runner.model, task.work_stamp(), True, first
    calls, spent_s = 1, 0.0
    with suppress(*REFUSALS):
        answer(used, seed + 1)
        calls = 2
        last = later = answer(used)
        calls, tells = LEAST_IN_A_ROW, differ(first, later)
        # on a GPU a position past the end ends the process
        bounded = runner.on_gpu and holds_integers(used, changed)
        while not bounded and calls < LONG_ROW:
            spent_s = task.work_s(started)
            if spent_s > (ORACLE_MAX_S if tells and calls < MOST_IN_A_ROW else LONG_ROW_S):
                break
            last = answer(used)
            calls += 1
        tells = tells or differ(first, last)
        if not tells:  # but perhaps of a call on much the same inputs
            answer(before := runner.build())
            tells = differ(answer_near(runner.build()), answer_near(before))
    row = _long_row(task, calls, spent_s / calls)
    calls = min(calls, MOST_IN_A_ROW if tells else LEAST_IN_A_ROW)
    told: list[str] = []
    for kind in by_kind(effects.buffers) if tells else ():
        names = [form.name for form in kind]
        told += names if differs_without(names) else ()
    hidden = not tells and not {x.name for x in effects.buffers}.issuperset(changed)
    if hidden:
        runner.effects, new = effects, runner.build()
        one, _, other = (answer(new, each) for each in (seed, seed + 1, seed))
        runner.effects, hidden = None, differ(one, other)
    buffers = [x.model_copy(update={"told": x.name in told}) for x in effects.buffers]
    update = {"buffers": buffers, "calls": calls, "row": row, "remembers": tells or hidden}
    return effects.model_copy(update=update)


def _near(x: Tensor) -> Tensor:
    return x * NEAR_SHARE if x.is_floating_point() else x


def _long_row(task: TaskModel, calls: int, call_s: float) -> int:
    """How many calls the longest row has that is compared."""
    inputs = leaves_of(task.inputs(task.runner.spec.seed))
    size = sum(x.nbytes for x in inputs if isinstance(x, Tensor))
    in_time = int(LONG_ROW_S / max(call_s, 1e-9))
    return min(calls, LONG_ROW, in_time, TIMED_INPUT_BYTES // max(1, size))


def _copy_into(model: Any, other: Any, names: list[str]) -> None:
    """Give a model these of another's buffers."""
    now, theirs = tensors_of(model), tensors_of(other)
    with torch.no_grad():
        for name in names:
            now[name].copy_(theirs[name])


def attributes_set(
    task: TaskModel, changed: list[str], state: State, outputs: list[Tensor]
) -> tuple[list[str], list[str]]:
    """Those of `changed` that are plain attributes, and that a call sets to tensors or numbers
    which differ by its inputs; and those of them that hold what the last call has computed on its
    way, to be looked at: as much as a part of its outputs, and nothing of earlier calls.
    """
    names = plain_values(task.runner.model, changed)
    if not names:
        return [], []
    seed, size = task.runner.spec.seed, sum(x.numel() for x in outputs)
    task.runner.model = task.runner.build()
    task.outputs(task.inputs(seed + 1))
    one = state_of(task.runner.model)
    differ = changed_state(state, one)
    kept = [name for name in names if name in differ]
    if task.runner.gradients is not None:
        return [], kept
    task.runner.model = task.runner.build()
    task.outputs(task.inputs(seed)), task.outputs(task.inputs(seed + 1))
    gathered = changed_state(one, state_of(task.runner.model))
    large = [name for name in kept if size < LARGE_VIEW * _size(one[name])]
    views = [name for name in large if name not in gathered]
    return [name for name in kept if name not in views], views


def _size(held: list[Any]) -> int:
    return sum(x.numel() for x in held if isinstance(x, Tensor))
