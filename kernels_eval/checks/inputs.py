"""Inputs and weights, made from a seed on the device itself, the same in two processes that never
exchange them.

Guarantees: for the same task source, seed, distribution and device, both processes hold
bit-identical inputs; what a task's inputs mean (integers, labels, masks, triangular or symmetric
matrices, probabilities) is kept when their distribution is varied. Does not guarantee that a varied
distribution makes sense to every task: one under which the reference fails or is not finite is
skipped.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections import OrderedDict
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from kernels_eval.checks.trials import DECLARED, InputNote, InputPlan
from kernels_eval.records import stable_hash

PERMUTED = "permuted"
"""Not a distribution: the elements of floating arguments in another order, which keeps labels,
masks and targets what they are."""


def load_module(path: str, name: str) -> ModuleType:
    """Execute a source file as a module of its own. The file must exist on disk: Triton and inspect
    read it again."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def construct(
    module: ModuleType,
    entry_point: str,
    init_module: ModuleType,
    init_form: str,
    seed: int,
    device: str,
) -> torch.nn.Module:
    """Build a task's model the way KernelBench does: the same seed before the arguments are made
    and again before the constructor runs.

    `device` is where weights are made (large ones take seconds on a CPU core); `moved` brings the
    model to where it is used.
    """
    arguments = constructor_arguments(init_module, init_form, seed, device)
    return constructed(module, entry_point, arguments, seed, device)


def constructor_arguments(
    module: ModuleType, init_form: str, seed: int, device: str
) -> tuple[list[Any], dict[str, Any]]:
    """What a task's constructor is called with, drawn under this seed."""
    torch.manual_seed(seed)
    with torch.device(device):
        made = module.get_init_inputs()
    args, kwargs = (made[0], made[1]) if init_form == "args_kwargs" else (made, {})
    args = [_to_device(value, device) for value in args]
    return args, {name: _to_device(value, device) for name, value in kwargs.items()}


def constructed(
    module: ModuleType,
    entry_point: str,
    arguments: tuple[list[Any], dict[str, Any]],
    seed: int,
    device: str,
) -> torch.nn.Module:
    """A model as its constructor leaves it under this seed."""
    args, kwargs = arguments
    torch.manual_seed(seed)
    with torch.device(device):
        model: torch.nn.Module = getattr(module, entry_point)(*args, **kwargs)
    return model


def moved(model: Any, device: str) -> Any:
    return model.to(device) if isinstance(model, torch.nn.Module) else model


def made_elsewhere(model: Any, device: str) -> bool:
    """Did the constructor make parameters on another device than it was asked to (torch.Tensor(...)
    does)? Then they were drawn by another random generator, and the same seed does not make the
    same weights."""
    kind = torch.device(device).type
    return isinstance(model, torch.nn.Module) and any(
        parameter.device.type != kind for parameter in model.parameters()
    )


def make_inputs(
    task: ModuleType,
    seed: int,
    distribution: str,
    plan: InputPlan | None,
    device: str,
    shape: str = DECLARED,
) -> list[Any]:
    """Arguments for one forward call. `plan` (from `plan_inputs`) says which arguments may be
    redrawn and resized; None: as declared."""
    torch.manual_seed(seed)
    with torch.device(device):
        values = [_to_device(value, device) for value in task.get_inputs()]
    if plan is None:
        return values
    if distribution != DECLARED:
        values = [
            _redraw(value, note, seed + index, distribution)
            for index, (value, note) in enumerate(zip(values, plan.notes, strict=True))
        ]
    for index, dim, size in plan.shapes.get(shape, ()):
        values[index] = values[index].narrow(dim, 0, size).contiguous()
    return values


def plan_inputs(inputs: list[Any]) -> InputPlan:
    """What may vary: floating tensors that are not labels, masks or probabilities; zero patterns
    and symmetry stay as declared."""
    sizes = [list(value.shape) if isinstance(value, torch.Tensor) else None for value in inputs]
    return InputPlan(notes=[_note(value) for value in inputs], shapes=smaller_shapes(sizes))


def smaller_shapes(shapes: list[list[int] | None]) -> dict[str, list[tuple[int, int, int]]]:
    """Ways to make all arguments smaller consistently: equal sizes shrink together, so that no
    dimension starts to broadcast.

    `batch_1`: the first dimension becomes 1, where its size occurs nowhere else. `odd_all`,
    `odd_last`, `odd_first`: every size (or that of the first tensor's last or first dimension)
    becomes odd. Whether the task accepts one of them is for the reference to say.
    """
    dims = [(i, d, size) for i, shape in enumerate(shapes) if shape for d, size in enumerate(shape)]
    sized = [shape for shape in shapes if shape]
    if not sized or 0 in {size for *_, size in dims}:
        return {}
    lead = next((shape for shape in sized if len(shape) > 1), sized[0])
    variants: dict[str, list[tuple[int, int, int]]] = {}
    if lead[0] > 1 and all(d == 0 for _, d, size in dims if size == lead[0]):
        variants["batch_1"] = [(i, d, 1) for i, d, size in dims if size == lead[0]]
    for name, wanted in (
        ("odd_all", {size for *_, size in dims}),
        ("odd_last", {lead[-1]}),
        ("odd_first", {lead[0]}),
    ):
        changed = [
            (i, d, size - 1 if size % 2 == 0 else size - 2)
            for i, d, size in dims
            if size in wanted and size > 3
        ]
        if changed and changed not in variants.values():
            variants[name] = changed
    return variants


def _note(value: Any) -> InputNote:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() == 0:
        return InputNote(vary=False)
    sample = value.detach()
    # labels, masks and targets of +-1 mean something by being integers
    integers = bool((sample == sample.round()).all())
    if integers or _probabilities(sample):
        return InputNote(vary=False)
    square = sample.dim() >= 2 and sample.shape[-1] == sample.shape[-2]
    return InputNote(
        vary=True,
        pattern=bool((sample == 0).float().mean() > 0.2),
        symmetric=square and torch.equal(sample, sample.transpose(-1, -2)),
    )


def _probabilities(sample: torch.Tensor) -> bool:
    if sample.dim() == 0 or sample.shape[-1] <= 1 or not bool((sample >= 0).all()):
        return False
    sums = sample.sum(-1)
    return torch.allclose(sums, torch.ones_like(sums), atol=1e-3)


def _redraw(value: Any, note: InputNote, seed: int, distribution: str) -> Any:
    if distribution == PERMUTED and isinstance(value, torch.Tensor) and value.is_floating_point():
        return _permuted(value, seed)
    if not note.vary:
        return value
    generator = torch.Generator(device=value.device).manual_seed(seed)
    shape, device, dtype = value.shape, value.device, value.dtype
    if distribution == "uniform":
        drawn = torch.rand(shape, generator=generator, device=device) * 2 - 1
    elif distribution == "small_integers":
        drawn = torch.randint(-3, 4, shape, generator=generator, device=device).float()
    else:
        drawn = torch.randn(shape, generator=generator, device=device)
        if distribution == "normal_x10":
            drawn *= 10
        if distribution == "sparse":
            drawn *= torch.rand(shape, generator=generator, device=device) < 0.1
    if note.pattern:
        drawn *= value != 0
    if note.symmetric:
        drawn = (drawn + drawn.transpose(-1, -2)) / 2
    return drawn.to(dtype)


def _permuted(value: torch.Tensor, seed: int) -> torch.Tensor:
    """The elements in another order. Of few, a drawn order may be the one they have: they are then
    moved by one place."""
    generator = torch.Generator(device=value.device).manual_seed(seed)
    drawn = value.reshape(-1)[
        torch.randperm(value.numel(), generator=generator, device=value.device)
    ].reshape(value.shape)
    return value.reshape(-1).roll(1).reshape(value.shape) if torch.equal(drawn, value) else drawn


def parameter_names(model: Any) -> list[str]:
    """Names of the floating parameters, in the order of `parameter_shapes`."""
    if not isinstance(model, torch.nn.Module):
        return []
    return [name for name, p in model.named_parameters() if p.is_floating_point()]


def parameter_shapes(model: Any) -> list[list[int]]:
    """Shapes of the floating parameters in order, without dimensions of size 1."""
    if not isinstance(model, torch.nn.Module):
        return []
    return [_squeezed(p) for p in model.parameters() if p.is_floating_point()]


def _squeezed(parameter: torch.Tensor) -> list[int]:
    return [size for size in parameter.shape if size != 1]


def randomise_weights(
    model: torch.nn.Module,
    seed: int,
    only: list[int] | None = None,
    names: Sequence[str] = (),
) -> None:
    """Refill floating parameters from (seed, shape, how many of that shape came before): names do
    not matter, nor dimensions of size 1.

    A model that has parameters of all of these `names` is filled in their order first. `only`
    chooses parameters by their position. Vectors are uniform in [0.5, 1.5]; higher ranks
    normal with standard deviation 1 / sqrt(fan-in), so outputs keep their scale.
    """
    seen: dict[tuple[int, ...], int] = {}
    own = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
    if names and set(names) <= own.keys():
        own = {name: own[name] for name in (*names, *own)}
    with torch.no_grad():
        for index, parameter in enumerate(own.values()):
            shape = tuple(_squeezed(parameter))
            if only is not None and index not in only:
                continue
            nth = seen[shape] = seen.get(shape, -1) + 1
            device = parameter.device
            own_seed = int(stable_hash([seed, shape, nth])[:15], 16)
            generator = torch.Generator(device=device).manual_seed(own_seed)
            if len(shape) < 2:
                drawn = torch.rand(shape, generator=generator, device=device) + 0.5
            else:
                drawn = torch.randn(shape, generator=generator, device=device)
                drawn /= max(1, math.prod(shape[1:])) ** 0.5
            parameter.copy_(drawn.reshape(parameter.shape))


def flatten_outputs(output: Any) -> tuple[list[Any], str]:
    """Leaves of a nested output in order, and a text that tells its structure."""
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
    """Is a nested output made of containers that run no code when they are read: list, dict, tuple
    and what only names a tuple's items?"""
    kind = type(output)
    if kind in (dict, OrderedDict):
        return all(map(plain_containers, dict.values(output)))
    if kind is list or (issubclass(kind, tuple) and kind.__iter__ is tuple.__iter__):
        return all(map(plain_containers, output))
    return not isinstance(output, list | tuple | dict)


def _to_device(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list | tuple):
        return type(value)(_to_device(item, device) for item in value)
    return value
