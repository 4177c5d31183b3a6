"""Inputs and weights, made from a seed on the device itself, the same in two processes that never exchange them.

Guarantees: for the same task source, seed, distribution and device, both processes hold bit-identical inputs; what a task's inputs mean
(integers, labels, masks, triangular or symmetric matrices, probabilities) is kept when their distribution is varied. Does not
guarantee that a varied distribution makes sense to every task: one under which the reference fails or is not finite is skipped.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from kernels_eval.records import stable_hash

DISTRIBUTIONS = ("declared", "uniform", "normal", "normal_x10", "sparse", "small_integers")


def load_module(path: str, name: str) -> ModuleType:
    """Execute a source file as a module of its own. The file must exist on disk: Triton and inspect read it again."""
    import importlib.util
    import sys

    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def construct(module: ModuleType, entry_point: str, init_module: ModuleType, init_form: str, seed: int, device: str) -> torch.nn.Module:
    """Build a model the way KernelBench does: the same seed before the arguments are made and again before the constructor runs."""
    torch.manual_seed(seed)
    with torch.device(device):
        arguments = init_module.get_init_inputs()
    args, kwargs = (arguments[0], arguments[1]) if init_form == "args_kwargs" else (arguments, {})
    args = [_to_device(value, device) for value in args]
    kwargs = {name: _to_device(value, device) for name, value in kwargs.items()}
    torch.manual_seed(seed)
    with torch.device(device):  # weights are made where they are used: large ones take seconds on a CPU core
        model = getattr(module, entry_point)(*args, **kwargs)
    return model.to(device) if isinstance(model, torch.nn.Module) else model


def make_inputs(task: ModuleType, seed: int, distribution: str, plan: list[dict[str, Any]] | None, device: str) -> list[Any]:
    """Arguments for one forward call. `plan` says which arguments may be redrawn (None: as declared)."""
    torch.manual_seed(seed)
    with torch.device(device):
        declared = [_to_device(value, device) for value in task.get_inputs()]
    if distribution == "declared" or plan is None:
        return declared
    return [_redraw(value, note, seed + index, distribution) for index, (value, note) in enumerate(zip(declared, plan, strict=True))]


def plan_inputs(inputs: list[Any]) -> list[dict[str, Any]]:
    """What may vary: floating tensors that are not labels, masks or probabilities; zero patterns and symmetry stay as declared."""
    return [_note(value) for value in inputs]


def _note(value: Any) -> dict[str, Any]:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() == 0:
        return {"vary": False}
    sample = value.detach()
    if bool((sample == sample.round()).all()):
        return {"vary": False}  # labels, masks, targets of +-1: their meaning is in being integers
    if sample.dim() > 0 and sample.shape[-1] > 1 and bool((sample >= 0).all()):
        if torch.allclose(sample.sum(-1), torch.ones_like(sample.sum(-1)), atol=1e-3):
            return {"vary": False}  # probabilities
    square = sample.dim() >= 2 and sample.shape[-1] == sample.shape[-2]
    return {
        "vary": True,
        "pattern": bool((sample == 0).float().mean() > 0.2),
        "symmetric": bool(square and torch.equal(sample, sample.transpose(-1, -2))),
    }


def _redraw(value: Any, note: dict[str, Any], seed: int, distribution: str) -> Any:
    if not note["vary"]:
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
    if note["pattern"]:
        drawn *= value != 0
    if note["symmetric"]:
        drawn = (drawn + drawn.transpose(-1, -2)) / 2
    return drawn.to(dtype)


def parameter_shapes(model: Any) -> list[list[int]]:
    """Shapes of the floating parameters in order: what tells whether two models' weights can be mapped onto each other."""
    if not isinstance(model, torch.nn.Module):
        return []
    return [list(p.shape) for p in model.parameters() if p.is_floating_point()]


def randomise_weights(model: torch.nn.Module, seed: int) -> None:
    """Refill every floating parameter from (seed, shape, how many of that shape came before): names do not matter.

    Vectors are uniform in [0.5, 1.5]; higher ranks normal with standard deviation 1 / sqrt(fan-in), so outputs keep their scale.
    """
    seen: dict[tuple[int, ...], int] = {}
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            shape = tuple(parameter.shape)
            nth = seen[shape] = seen.get(shape, -1) + 1
            device = parameter.device
            generator = torch.Generator(device=device).manual_seed(int(stable_hash([seed, shape, nth])[:15], 16))
            if len(shape) < 2:
                drawn = torch.rand(shape, generator=generator, device=device) + 0.5
            else:
                drawn = torch.randn(shape, generator=generator, device=device) / max(1, parameter[0].numel()) ** 0.5
            parameter.copy_(drawn)


def flatten_outputs(output: Any) -> tuple[list[Any], str]:
    """Leaves of a nested output in order, and a text that tells its structure."""
    if isinstance(output, list | tuple):
        leaves, structure = [], []
        for item in output:
            inner, text = flatten_outputs(item)
            leaves += inner
            structure.append(text)
        return leaves, "(" + ",".join(structure) + ")"
    if isinstance(output, dict):
        leaves, structure = [], []
        for key in sorted(output, key=str):
            inner, text = flatten_outputs(output[key])
            leaves += inner
            structure.append(f"{key}:{text}")
        return leaves, "{" + ",".join(structure) + "}"
    return [output], "."


def _to_device(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list | tuple):
        return type(value)(_to_device(item, device) for item in value)
    return value
