"""Inputs and weights made from a seed, the same in two processes that never exchange them.

Guarantees: one task source, seed, distribution and device give bit-identical inputs, whose meaning
(integers, labels, masks, matrix structure, probabilities) is kept.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from kernels_eval.config import FEW_TERMS_KINDS, LARGEST_CONSTANT, MOST_CONSTANTS
from kernels_eval.model.distributions import make_distinct
from kernels_eval.model.few_terms import with_few_terms
from kernels_eval.model.invariants import decides_shapes, note_of
from kernels_eval.model.mutations import mutated_as
from kernels_eval.model.redraws import VARIATIONS_BY_DRAW, faint_as, redrawn
from kernels_eval.model.seeding import seed_generators
from kernels_eval.model.smaller_shapes import UNDIVIDED, smaller_shapes
from kernels_eval.model.structures import restructured
from kernels_eval.model.task_text import code_of
from kernels_eval.model.values import flattened, leaves_of, rebuilt
from kernels_eval.protocol import (
    APART,
    DECLARED,
    FAINT,
    MUTATED,
    AboutTask,
    InputPlan,
    ModelSpec,
)
from kernels_eval.records import Json

PRECISIONS = {"": None, "fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
"""What a task's constant `PRECISION` casts floating inputs and parameters to, as KernelBench's
option does (`src/kernelbench/eval.py`, `_process_input_tensor`, and
`model.to(dtype=precision)`).
"""
NUMBER = re.compile(r"(?<![\w.])\d+\.?\d*(?:e-?\d+)?(?![\w.])", re.IGNORECASE)
REDRAWN_SEED = 0x3A1C5
"""Makes a seed for what is redrawn: the task's own numbers would come again, and sort its masks."""
OTHER_GENERATOR = "device type for generator"
"""What torch says where a generator is of another device than what it should fill."""
Arguments = tuple[list[Any], Json]


def load_module(path: str, name: str) -> ModuleType:
    """Execute a source file as a module, kept on disk: Triton and inspect read it again."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load_candidate(path: str) -> ModuleType:
    """Load a copy in the working directory: many candidates write beside their file."""
    return load_module(os.path.abspath(shutil.copy(path, os.curdir)), "candidate")


def construct(module: ModuleType, task: ModuleType, spec: ModelSpec) -> nn.Module:
    """Build a task's model as KernelBench does: one seed before the arguments and again before the
    constructor.

    Weights are made on `construct_on` (large ones take seconds on a CPU core), then `moved`.
    """
    own = spec.model_copy(update={"precision": precision_of(task)})
    return constructed(module, constructor_arguments(task, spec), own)


def declared(task: AboutTask[Any], device: str, construct_on: str) -> ModelSpec:
    return ModelSpec(
        entry_point=task.entry_point,
        init_form=task.init_form,
        device=device,
        construct_on=construct_on,
    )


def precision_of(task: ModuleType) -> str:
    """A task module's precision. Raises ValueError for an unknown one."""
    found = str(getattr(task, "PRECISION", ""))
    if found not in PRECISIONS:
        raise ValueError(f"PRECISION is {found!r}, which is none of {', '.join(PRECISIONS)[2:]}")
    return found


def constructor_arguments(module: ModuleType, spec: ModelSpec) -> Arguments:
    made = made_on(spec.construct_on, spec.seed, module.get_init_inputs)
    args, kwargs = made[:2] if spec.init_form == "args_kwargs" else (made, {})
    dtype, device = PRECISIONS[precision_of(module)], spec.construct_on
    moved_kwargs = {name: _to_device(value, device, dtype) for name, value in kwargs.items()}
    return [_to_device(value, device, dtype) for value in args], moved_kwargs


def constructed(module: ModuleType, arguments: Arguments, spec: ModelSpec) -> nn.Module:
    args, kwargs = arguments
    seed_generators(spec.seed)
    with torch.device(spec.construct_on):
        model: nn.Module = getattr(module, spec.entry_point)(*args, **kwargs)
    dtype = PRECISIONS[spec.precision]
    return model.to(dtype) if dtype and isinstance(model, nn.Module) else model


def moved(model: Any, device: str) -> Any:
    return model.to(device) if isinstance(model, nn.Module) else model


def made_elsewhere(model: Any, device: str) -> bool:
    """Whether parameters were made on another device than asked: another generator, so other
    weights.
    """
    kind = torch.device(device).type
    return isinstance(model, nn.Module) and any(
        parameter.device.type != kind for parameter in model.parameters()
    )


def made_on(device: str, seed: int, make: Callable[[], Any]) -> Any:
    """What a task's function makes on a default device; without one, as KernelBench calls it, where
    it draws from a CPU generator of its own."""
    seed_generators(seed)
    try:
        with torch.device(device):
            return make()
    except RuntimeError as error:
        if OTHER_GENERATOR not in str(error):
            raise
    seed_generators(seed)
    return make()


def make_inputs(
    task: ModuleType,
    seed: int,
    distribution: str,
    plan: InputPlan | None,
    device: str,
    shape: str = DECLARED,
    operands: Sequence[Tensor] = (),
) -> list[Any]:
    """Arguments for one call. `plan`: which tensors may be redrawn and resized; None: as
    declared. `operands`: what the task computes with.
    """
    made, dtype = made_on(device, seed, task.get_inputs), PRECISIONS[precision_of(task)]
    values = [_to_device(value, device, dtype) for value in made]
    if plan is None:
        return values
    leaves, form = flattened(values)
    for index, dim, size in plan.shapes.get(shape, ()):
        part = leaves[index].narrow(dim, 0, size)  # dense, in the order of its strides
        if plan.notes[index].varied == "probabilities":
            part = part / part.sum(-1, keepdim=True)
        leaves[index] = part if part.is_contiguous() else torch.empty_like(part).copy_(part)
    if distribution in FEW_TERMS_KINDS:
        return list(rebuilt(with_few_terms(leaves, plan, seed, distribution), form))
    if distribution.startswith(MUTATED):
        leaves = mutated_as(distribution, leaves, plan, operands)
    elif distribution.startswith((FAINT, APART)):
        leaves = faint_as(distribution, leaves, plan)
    elif distribution != DECLARED:  # drawn last: what it changes lies within the smaller shape
        other = seed ^ REDRAWN_SEED
        leaves = [
            redrawn(leaf, note, other + index, distribution, plan)
            for index, (leaf, note) in enumerate(zip(leaves, plan.notes, strict=True))
        ]
        if distribution in VARIATIONS_BY_DRAW:
            once = Random(f"{seed} {distribution}").getrandbits(31)
            leaves = restructured(leaves, plan, once)
    if plan.distinct:
        varies = distribution in VARIATIONS_BY_DRAW
        for leaf, note in zip(leaves, plan.notes, strict=True):
            if note.vary and not note.keeps and not (varies and note.varied == "tied"):
                make_distinct(leaf)
    return list(rebuilt(leaves, form))


def plan_inputs(
    draws: list[list[Any]],
    uses: list[set[str]] | None = None,
    text: str = "",
    seed: int = 0,
    parts: Mapping[int, int] = UNDIVIDED,
) -> InputPlan:
    """What may vary, by several declared draws: a note for each tensor, also in lists, and smaller
    shapes, drawn by `seed` (`parts`: `smaller_shapes`). `uses`: of each, and the task's source
    (`note_of`).
    """
    code = code_of(text)
    leaves = [leaves_of(values) for values in draws]
    sizes = [list(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves[0]]
    largest = max((max(size, default=0) for size in sizes if size), default=0)
    notes = [
        note_of(list(drawn), used, code, largest)
        for drawn, used in zip(
            zip(*leaves, strict=True), uses or [set()] * len(leaves[0]), strict=True
        )
    ]
    fixed = any(map(decides_shapes, leaves[0], notes))
    shapes = {} if fixed else smaller_shapes(sizes, Random(seed), parts)
    tables = {note.below for note in notes if note.below}
    shapes = {
        name: changes
        for name, changes in shapes.items()
        # places would lie out of bounds, where a GPU ends the process
        if not any((size := sizes[index]) and size[dim] in tables for index, dim, _ in changes)
    }
    return InputPlan(notes=notes, shapes=shapes, constants=constants_in(code))


def constants_in(text: str) -> list[float]:
    """The least numbers of a source, without signs."""
    numbers = {float(number) for number in NUMBER.findall(text)}
    return sorted(x for x in numbers if x <= LARGEST_CONSTANT)[:MOST_CONSTANTS]


def flatten_outputs(output: Any) -> tuple[list[Any], str]:
    """Leaves of a nested output in order, and its structure as text, None included."""
    if output is None:
        return [], "None"
    if isinstance(output, dict):
        items = [(f"{key}:", output[key]) for key in sorted(output, key=str)]
        form = "{{{}}}"
    elif isinstance(output, list | tuple):
        items, form = [("", item) for item in output], "({})"
    else:
        return [output], "."
    leaves, structure = [], []
    for label, item in items:
        inner, text = flatten_outputs(item)
        leaves += inner
        structure.append(label + text)
    return leaves, form.format(",".join(structure))


def plain_containers(output: Any) -> bool:
    """Whether a nested output has only containers that run no code when read."""
    kind = type(output)
    if kind in (dict, OrderedDict):
        return all(map(plain_containers, dict.values(output)))
    if kind is list or (issubclass(kind, tuple) and kind.__iter__ is tuple.__iter__):
        return all(map(plain_containers, output))
    return not isinstance(output, list | tuple | dict)


def _to_device(value: Any, device: str, dtype: torch.dtype | None = None) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.is_floating_point() else None)
    if isinstance(value, list | tuple):
        return type(value)(_to_device(item, device, dtype) for item in value)
    return value
