"""What a constructor draws and no trial redraws by shape: integers, masks, random buffers. Only the
constructor knows which values these may have, so another model of another seed gives them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from kernels_eval.model.measurement import same
from kernels_eval.model.weights import COUNTED, parameters_of, squeezed
from kernels_eval.protocol import BufferForm

Names = dict[str, str]


def may_be_drawn(model: Any, but: Collection[str] = ()) -> dict[str, Tensor]:
    """What a checkpoint holds besides floating parameters and statistics. `but`: not these."""
    if not isinstance(model, nn.Module):
        return {}
    without = {*parameters_of(model), *but}
    held = model.state_dict(keep_vars=True).items()
    tensors = {name: x for name, x in held if isinstance(x, Tensor) and name not in without}
    return {name: x for name, x in tensors.items() if name.rpartition(".")[2] not in COUNTED}


def drawn_forms(model: Any, other: Any, but: Collection[str] = ()) -> list[BufferForm]:
    """What of that differs between a model and one of another seed."""
    theirs = may_be_drawn(other, but)
    return [
        BufferForm(name=name, shape=squeezed(x), dtype=str(x.dtype))
        for name, x in may_be_drawn(model, but).items()
        if name not in theirs or not same(x.detach(), theirs[name].detach())
    ]


def counterparts(model: Any, forms: Sequence[BufferForm]) -> Names:
    """What a model holds these in, by their names: of one name, else of one shape and type in
    order, also plain attributes."""
    parameters = parameters_of(model)
    left = {name: x for name, x in tensors_of(model).items() if name not in parameters}
    found: Names = {}
    named = [form for form in forms if form.name in left and _fits(form, left[form.name])]
    for form in (*named, *(form for form in forms if form not in named)):
        fitting = (name for name, x in left.items() if _fits(form, x))
        name = form.name if form in named else next(fitting, "")
        if name:
            found[form.name] = name
            del left[name]
    return found


def unheld(model: Any, forms: Sequence[BufferForm]) -> list[str]:
    """Names of what a model has no counterpart for."""
    found = counterparts(model, forms)
    return [form.name for form in forms if form.name not in found]


def tensors_of(model: Any) -> dict[str, Tensor]:
    """Parameters, buffers, and tensors in plain attributes, by name."""
    if not isinstance(model, nn.Module):
        return {}
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if not name.startswith("_") or isinstance(value, Tensor):
                leaves = [x for x in tree_leaves(value) if isinstance(x, Tensor)]
                found |= {f"{path}.{name}.{at}": x for at, x in enumerate(leaves)}
    return found


def renew(model: Any, other: Any, names: Collection[str] | None = None) -> None:
    """Write another model's values into these tensors of a model; into all where none are named."""
    theirs = tensors_of(other)
    with torch.no_grad():
        for name, x in tensors_of(model).items():
            new = theirs.get(name)
            if new is not None and new.shape == x.shape and (names is None or name in names):
                x.copy_(new)


def _fits(form: BufferForm, x: Tensor) -> bool:
    return squeezed(x) == form.shape and str(x.dtype) == form.dtype
