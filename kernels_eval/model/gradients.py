"""The backward pass of a call, where a task asks for gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from kernels_eval.model.inputs import flatten_outputs
from kernels_eval.protocol import Gradients

Passes = Callable[[str], AbstractContextManager[None]]
"""What spans the "forward" and the "backward" pass of a call."""


def asked_gradients(model: Any, inputs: list[Any]) -> Gradients:
    """Which gradients a task with `GRADIENTS` asks for. Raises ValueError where nothing has one."""
    floats = [index for index, x in enumerate(inputs) if _is_float(x)]
    marked = [index for index in floats if inputs[index].requires_grad]
    held = model.named_parameters() if isinstance(model, torch.nn.Module) else ()
    names = [name for name, x in held if x.requires_grad and _is_float(x)]
    if not floats and not names:
        raise ValueError("GRADIENTS is set, but no argument and no parameter is a floating tensor")
    return Gradients(arguments=len(inputs), wanted=marked or floats, parameters=names)


def with_gradients(
    model: Any,
    inputs: tuple[Any, ...],
    asked: Gradients,
    passes: Passes,
    between: Sequence[Any] = (),
) -> tuple[Any, list[Any], list[Any]]:
    """A call's output and the gradients of its arguments and parameters. Gradients of the outputs
    are the last of `inputs`. `between`: arguments of another forward pass before the backward
    one, as a layer has that is used twice, or losses that are added up.

    A model without autograd has `backward(*gradients)`, which returns those of arguments, then
    parameters. Outputs of a wrong form have none: `([], [])`. Raises what the model raises.
    """
    arguments, given = list(inputs[: asked.arguments]), inputs[asked.arguments :]
    for index in asked.wanted:
        arguments[index] = arguments[index].detach().requires_grad_()
    leaves = [*(arguments[index] for index in asked.wanted), *_parameters(model, asked.parameters)]
    with torch.enable_grad():
        with passes("forward"):
            output = model(*arguments)
        outputs = [x for x in flatten_outputs(output)[0] if _is_float(x)]
        if [x.shape for x in outputs] != [x.shape for x in given]:
            return _detached(output), [], []
        if between and any(x.requires_grad for x in outputs):
            model(*between[: asked.arguments])
        with passes("backward"):
            found = _gradients(model, outputs, given, leaves)
    count = len(asked.wanted)
    return _detached(output), found[:count], found[count:]


def _gradients(
    model: Any, outputs: list[Tensor], given: tuple[Tensor, ...], leaves: list[Tensor]
) -> list[Any]:
    pairs = [pair for pair in zip(outputs, given, strict=True) if pair[0].requires_grad]
    if pairs:
        ends, starts = zip(*pairs, strict=True)
        return list(torch.autograd.grad(ends, leaves, starts, materialize_grads=True))
    if not callable(getattr(model, "backward", None)):
        raise RuntimeError(
            "no output has a gradient: use torch.autograd.Function, or define backward(*gradients)"
        )
    with torch.no_grad():
        return flatten_outputs(model.backward(*given))[0]


def _parameters(model: Any, names: tuple[str, ...]) -> list[Tensor]:
    held = dict(model.named_parameters()) if isinstance(model, torch.nn.Module) else {}
    if set(names) <= held.keys():
        return [held[name].requires_grad_() for name in names]
    return [x for x in held.values() if x.requires_grad and _is_float(x)]


def _is_float(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _detached(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.detach()
    if isinstance(output, dict):
        return {name: _detached(x) for name, x in output.items()}
    if type(output) in (list, tuple):
        return type(output)(map(_detached, output))
    return output
