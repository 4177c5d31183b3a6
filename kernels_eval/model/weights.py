"""A model's parameters and buffers, redrawn the same in two processes."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from kernels_eval.config import (
    CONSTANT_SAMPLE,
    CONSTANT_SHARE,
    COUPLING,
    DIGEST_SAMPLE,
    RIGHT_ANGLE,
    ROW_SCALES,
)
from kernels_eval.model.invariants import has_low_rank
from kernels_eval.model.measurement import as_real, computable
from kernels_eval.model.shifts import shift_weights
from kernels_eval.model.weight_changes import changed, shared_rows
from kernels_eval.protocol import (
    CHANGED,
    LARGE,
    LEADING,
    LESS,
    POSITIVE_VECTORS,
    SCALED,
    SHIFTED,
    SIGNED,
    UNTAMED,
)
from kernels_eval.records import stable_hash

STATISTICS = ("running_mean", "running_var")
COUNTED = (*STATISTICS, "num_batches_tracked")
"""Buffers that a call changes in training."""


WALKS = (
    *("parameters", "named_parameters", "buffers", "named_buffers", "_named_members"),
    *("modules", "named_modules", "children", "named_children"),
)
"""Methods by which a model's weights are found."""


def own_walk(model: object) -> str:
    """The first of `WALKS` that a module of a model has made its own, such as to know when somebody
    is about to change its weights; "" where there is none. Torch's own modules may.
    """
    left, seen = [model], set[int]()
    while left:
        module = left.pop()
        if not isinstance(module, nn.Module) or id(module) in seen:
            continue
        seen.add(id(module))
        left += vars(module)["_modules"].values()
        for name in WALKS:
            found = vars(module).get(name) or getattr(type(module), name)
            if not getattr(found, "__module__", "").startswith("torch."):
                return name
    return ""


def parameters_of(model: Any) -> dict[str, Tensor]:
    held = model.named_parameters() if isinstance(model, nn.Module) else ()
    return {name: p for name, p in held if p.is_floating_point() or p.is_complex()}


def frozen_of(model: Any) -> dict[str, Tensor]:
    """Parameters without gradient, which may hold what others hold in buffers."""
    return {name: p for name, p in parameters_of(model).items() if not p.requires_grad}


def is_constant(weight: Tensor) -> bool:
    """Whether one number stands for many elements: what multiplies by 0 or 1 could be left out."""
    flat = as_real(computable(weight.detach())).reshape(-1)
    _, counts = flat[:: flat.numel() // CONSTANT_SAMPLE + 1].unique(return_counts=True)
    most = int(counts.max()) if len(counts) else 0
    return flat.numel() == 1 or most >= max(2, CONSTANT_SHARE * int(counts.sum()))


def is_structured(weight: Tensor) -> bool:
    """Whether a constructor made it of less than its elements: of one number, of equal rows or
    parts, or with rows or columns at right angles, as rotations have.
    """
    x = computable(as_real(weight.detach()))
    return is_constant(weight) or (x.dim() > 1 and (has_low_rank(x) or _has_right_angles(x)))


def _has_right_angles(x: Tensor) -> bool:
    rows = x.flatten(1)
    rows = rows if len(rows) <= rows.shape[1] else rows.T
    few = torch.nn.functional.normalize(rows[:8].float())
    if len(few) < 8:
        return False
    return float((few @ few.T - torch.eye(8, device=few.device)).abs().max()) < RIGHT_ANGLE


def digest_of(parameter: Tensor) -> str:
    """Of some of its elements: the same in two processes that construct it alike."""
    flat = as_real(parameter.detach()).reshape(-1)
    return stable_hash(flat[:: flat.numel() // DIGEST_SAMPLE + 1].tolist())


def squeezed(parameter: Tensor) -> list[int]:
    return [size for size in parameter.shape if size != 1]


def running_statistics(
    model: Any, *, renamed: bool = False, but: Collection[str] = ()
) -> list[Tensor]:
    """Running statistics of normalisation layers, and buffers made of zeros or of ones, in order;
    else, if `renamed`, floating buffers and plain tensor attributes. `but`: not these names.
    """
    if not isinstance(model, nn.Module):
        return []
    held = model.named_buffers()
    buffers = {name: b for name, b in held if b.is_floating_point() and name not in but}
    statistics = {name for name in buffers if name.rpartition(".")[2] in STATISTICS}
    if statistics or not renamed:
        return [b for name, b in buffers.items() if name in statistics or _is_gain(b)]
    values = [value for each in model.modules() for value in vars(each).values()]
    plain = [x for x in values if isinstance(x, Tensor) and x.is_floating_point()]
    return [*buffers.values(), *plain]


def _is_gain(buffer: Tensor) -> bool:
    """Whether a buffer was made of zeros or ones, as weights are. One number alone is a setting."""
    if buffer.numel() < 2:
        return False
    first = float(buffer.reshape(-1)[0])
    return first in (0.0, 1.0) and bool((computable(buffer) == first).all())


def redraw_statistics(tensors: list[Tensor], seed: int) -> None:
    """Refill running statistics, uniform in [0.5, 1.5]; a mean and its variance get the same
    values.
    """
    seen: dict[tuple[int, ...], int] = {}
    for tensor in tensors:
        shape = tuple(squeezed(tensor))
        nth = seen[shape] = seen.get(shape, -1) + 1
        _refill(tensor, [seed, "statistics", shape, nth // 2], POSITIVE_VECTORS, uniform=True)


def _refill(tensor: Tensor, identity: list[Any], form: str, *, uniform: bool = False) -> None:
    """Refill from a hash: vectors uniform in [0.5, 1.5], others normal, std 1 / sqrt(fan-in).

    `SIGNED`: vectors of either sign, one in eight elements eight times as large.
    `LASTING`, `LARGE`: rows multiplied by some numbers, square matrices (of the first: and stacks
    of these) almost multiples of the identity. `LEADING`: these almost of rank one, symmetric.
    `CHANGED`, after one of these: changed at random.
    """
    tensor = as_real(tensor.detach())
    shape, device = squeezed(tensor), tensor.device
    generator = torch.Generator(device).manual_seed(int(stable_hash(identity)[:15], 16))
    if uniform or len(shape) < 2:
        drawn = torch.rand(shape, generator=generator, device=device) + 0.5
        if form.startswith(SIGNED):  # a single number, too
            drawn.view(-1)[min(1, drawn.numel() - 1) :: 2].neg_()
            drawn.view(-1)[8::8].mul_(8)  # a decay that is near 1 forgets late
    else:
        drawn = torch.randn(shape, generator=generator, device=device)
        drawn /= max(1, math.prod(shape[1:])) ** 0.5
    if form in UNTAMED and drawn.numel():
        _untame(drawn, form, generator)
    _, changes, seeds = form.partition(CHANGED)
    for seed in seeds.split("_")[1:] if changes else ():
        drawn = changed(drawn, [seed, *identity[1:]])
    with torch.no_grad():
        tensor.copy_(drawn.reshape(tensor.shape))


def _untame(drawn: Tensor, form: str, generator: torch.Generator) -> None:
    *_, rows, columns = 1, 1, *drawn.shape
    size, device = min(rows, columns), drawn.device
    fits = rows == columns if form in LARGE else rows % size == columns % size == 0
    if fits and 1 < drawn.dim() < 4:
        unit = torch.eye(size, device=device)
        if form in LEADING:
            one = torch.randn(size, generator=generator, device=device)
            unit = torch.outer(one, one) * size**0.5 / one.square().sum()
        drawn.mul_(COUPLING).add_(unit.repeat(rows // size, columns // size))
    scales = torch.tensor(ROW_SCALES[form.partition(LESS)[0]], device=device)
    shape = (*drawn.shape[:-1], 1) if drawn.dim() > 1 else drawn.shape
    drawn *= scales[torch.randint(len(scales), shape, generator=generator, device=device)]
    drawn /= 2 ** form.count(LESS)


def padded_shapes(model: Any) -> list[list[int]]:
    """Shapes of tables of which no training changes a row, as their module says (`padding_idx`)."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    padded = [each for each in modules if getattr(each, "padding_idx", None) is not None]
    return [squeezed(x) for each in padded for x in each.parameters(recurse=False)]


def _row_of_padding(weight: Tensor) -> Tensor:
    """The one row of zeros of a matrix."""
    if weight.dim() != 2 or min(weight.shape) < 2:
        return torch.empty(0)
    rows = (computable(weight) == 0).all(1).nonzero()
    return weight[int(rows)] if rows.numel() == 1 else torch.empty(0)


def randomise_weights(
    model: nn.Module,
    seed: int,
    only: list[int] | None = None,
    names: Sequence[str] = (),
    but: Collection[str] = (),
    *,
    form: str = POSITIVE_VECTORS,
    padded: Collection[list[int]] = (),
) -> None:
    """Refill floating parameters from (seed, shape, how many of that shape came before), whatever
    their names and dimensions of size 1.

    Those of `names` are filled first, in their order. `only`: positions; `but`: not these
    names. In those of `padded` shapes the one row of zeros stays. `form`: as of `_refill`, or
    `SCALED`, which multiplies all by one number of few digits, with which packing and transposing
    commute, or `SHIFTED`.
    """
    seen: dict[tuple[int, ...], int] = {}
    firsts: dict[tuple[int, ...], Tensor] = {}
    own = {name: p for name, p in parameters_of(model).items() if name not in but}
    if form == SCALED:
        factor = Random(seed).choice((*range(12, 16), *range(17, 25))) / 16
        for parameter in own.values():
            parameter.detach().mul_(factor)
        return
    own = {name: own[name] for name in (*names, *own) if name in own}
    if form.startswith(SHIFTED):
        shift_weights(((p, squeezed(p)) for p in own.values()), seed, form)
        return
    for index, parameter in enumerate(own.values()):
        shape = tuple(squeezed(parameter))
        if only is None or index in only:
            nth = seen[shape] = seen.get(shape, -1) + 1
            stays = _row_of_padding(parameter.detach()) if [*shape] in padded else torch.empty(0)
            _refill(parameter, [seed, shape, nth], form)
            if CHANGED in form and parameter.is_floating_point():
                drawn = parameter.detach().reshape(shape)
                other = firsts.setdefault(shape, drawn)
                if nth:
                    drawn = shared_rows(drawn, other, [form, seed, shape, nth])
                    parameter.detach().copy_(drawn.reshape(parameter.shape))
            stays.zero_()


def exchange_elements(model: Any, seed: int) -> None:
    """Exchange one element of each parameter with the one farthest from it: sums and norms stay.
    One number alone is doubled."""
    random = Random(seed)
    for parameter in parameters_of(model).values():
        values = as_real(parameter.detach())
        flat = values.flatten()
        if len(flat) == 1:
            flat = 2 * flat
        elif len(flat):
            one = random.randrange(len(flat))
            pair = [one, int((flat - flat[one]).abs().argmax())]
            flat = flat.index_copy(0, torch.tensor(pair, device=flat.device), flat[pair[::-1]])
        values.copy_(flat.view(values.shape))


def weights_of(model: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The values of its floating parameters, and of buffers that calls leave alone, by name."""
    buffers = model.named_buffers() if isinstance(model, nn.Module) else ()
    kept = {name: b.detach() for name, b in buffers if name.rpartition(".")[2] not in COUNTED}
    return {name: p.detach() for name, p in parameters_of(model).items()}, kept


def copy_weights(model: Any, parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
    """Give a model these values: parameters by name where shapes agree, others by shape and order;
    buffers by name."""
    own, left = parameters_of(model), dict(parameters)
    named = [x for x in left if x in own and squeezed(own[x]) == squeezed(left[x])]
    with torch.no_grad():
        for name in (*named, *(x for x in own if x not in named)):
            parameter = own[name]
            fitting = [other for other in left if squeezed(left[other]) == squeezed(parameter)]
            for other in [name] if name in named else fitting[:1]:
                parameter.copy_(left.pop(other).reshape(parameter.shape))
        for name, buffer in model.named_buffers() if isinstance(model, nn.Module) else ():
            if name in buffers and buffers[name].shape == buffer.shape:
                buffer.copy_(buffers[name])


def transpose_weights(model: nn.Module) -> None:
    """Transpose all square parameter matrices: a candidate may keep them so."""
    with torch.no_grad():
        for parameter in parameters_of(model).values():
            if parameter.dim() == 2 and parameter.shape[0] == parameter.shape[1]:
                parameter.copy_(parameter.t().clone())
